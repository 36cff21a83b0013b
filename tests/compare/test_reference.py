from __future__ import annotations

from pathlib import Path

import numpy as np

from kvcompress.compare.reference import Playback, Recording


def test_what_was_recorded_is_played_back_in_any_steps(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    recording = Recording(tmp_path / "rows")
    for part in np.array_split(rows, 3):
        assert (recording.rows_for(part) == part).all()
    playback = Playback(tmp_path / "rows")
    got = [playback.rows_for(np.zeros((n, 6), np.float32)) for n in (1, 15, 4)]
    assert (np.concatenate(got) == rows).all()


def test_a_new_recording_starts_from_nothing(tmp_path: Path) -> None:
    ones = np.ones((2, 3), np.float32)
    Recording(tmp_path / "rows").rows_for(ones)
    Recording(tmp_path / "rows").rows_for(2 * ones)
    assert (Playback(tmp_path / "rows").rows_for(ones) == 2).all()
