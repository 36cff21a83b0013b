from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvcompress.calibrate.calibration import Calibration
from kvcompress.calibrate.samples import LayerMoments
from kvcompress.calibrate.sharded import heads_of
from kvcompress.errors import BrokenPlugin, CalibrationMismatch, ConfigError
from kvcompress.layers import LayerSpec, Rotary
from tests.calibrate.fakes import Peak, calibration

WHOLE = tuple(LayerSpec(index, 4, 8, 8, 6, "float32", Rotary(8, base=1000.0)) for index in (0, 2))
HALF = tuple(attrs.evolve(layer, kv_heads=2, query_heads=4) for layer in WHOLE)


class ByHead(Peak):
    head_tables = ("key_steps", "value_steps", "not there")


class Wrong(Peak):
    head_tables = ("drawn",)


def made(*methods: Any) -> Calibration:
    return calibration(*methods, layers=WHOLE)


@pytest.mark.parametrize(
    ("heads", "size", "owned"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_are_dealt_out_in_neighbouring_runs(
    heads: int, size: int, owned: list[tuple[int, int]]
) -> None:
    layer = LayerSpec(0, heads, 8)
    found = [heads_of(layer, rank, size) for rank in range(size)]
    assert [(part.start, part.stop) for part in found] == owned


@pytest.mark.parametrize(("heads", "queries", "size"), [(3, 6, 2), (2, 6, 4), (2, 6, 3)])
def test_heads_that_cannot_be_dealt_out_are_told_of(heads: int, queries: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} KV heads and {queries} query heads of layer 0"):
        heads_of(LayerSpec(0, heads, queries), 0, size)


def test_a_share_serves_a_rank_with_what_is_its_own() -> None:
    whole, method = made(ByHead()), ByHead()
    for rank in (0, 1):
        part, heads = whole.shard(rank, 2), slice(2 * rank, 2 * rank + 2)
        for layer, half in zip(WHOLE, HALF, strict=True):
            for attribute in attrs.fields(LayerMoments):
                mine = getattr(part.moments(half), attribute.name)
                all_heads = getattr(whole.moments(layer), attribute.name)
                if isinstance(mine, np.ndarray):
                    np.testing.assert_array_equal(mine, all_heads[heads])
            mine, all_tables = part.tables(method, half), whole.tables(method, layer)
            for name in ("key_steps", "value_steps"):
                np.testing.assert_array_equal(mine[name], all_tables[name][heads])
            np.testing.assert_array_equal(mine["drawn"], all_tables["drawn"])


def test_shares_differ_and_are_as_good_as_any_calibration(tmp_path: Path) -> None:
    parts = [made(ByHead()).shard(rank, 2) for rank in (0, 1)]
    assert parts[0].fingerprint != parts[1].fingerprint
    parts[1].save(tmp_path / "part")
    loaded = Calibration.load(tmp_path / "part")
    assert loaded.fingerprint == parts[1].fingerprint
    assert not any(array.flags.writeable for _, array in parts[0].arrays())
    with pytest.raises(CalibrationMismatch, match="can be merged"):
        parts[0].merged(parts[1])


def test_a_calibration_can_be_shared_out_after_it_was_saved(tmp_path: Path) -> None:
    whole = made(ByHead())
    whole.save(tmp_path / "cal")
    loaded = Calibration.load(tmp_path / "cal")
    assert loaded.shard(1, 2).fingerprint == whole.shard(1, 2).fingerprint


def test_one_rank_has_all() -> None:
    whole = made(Peak())
    assert whole.shard(0, 1) is whole


def test_the_whole_is_refused_to_a_rank_with_what_to_do() -> None:
    whole = made(ByHead())
    with pytest.raises(
        CalibrationMismatch,
        match=r"kv_heads 4 in the calibration, 2 in the model; .*"
        r"the model is one of 2 ranks: pass calibration\.shard\(rank, 2\)",
    ):
        whole.tables(ByHead(), HALF[0])
    with pytest.raises(CalibrationMismatch, match="another model: calibrate this one"):
        whole.moments(attrs.evolve(HALF[0], head_dim=16))
    with pytest.raises(CalibrationMismatch, match="another model: calibrate this one"):
        whole.moments(attrs.evolve(HALF[0], kv_heads=4))


def test_tables_that_are_not_said_to_be_by_head_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tables of peak cannot be divided .*head_tables"):
        made(Peak()).shard(0, 2)
    assert made(Peak()).subset([]).shard(0, 2).moments(HALF[0])


def test_tables_that_are_wrongly_said_to_be_by_head_are_told_of() -> None:
    with pytest.raises(BrokenPlugin, match=r"'drawn', whose leading axis .* 4 KV heads .*got 3"):
        made(Wrong()).shard(0, 2)


@pytest.mark.parametrize("names", ["key_steps", (1,)])
def test_head_tables_must_be_names(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByHead, "head_tables", names)
    with pytest.raises(BrokenPlugin, match="peak: head_tables must be a tuple of names"):
        made(ByHead())


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (True, 2), (0.0, 2)])
def test_a_rank_that_is_none_is_refused(rank: Any, size: Any) -> None:
    with pytest.raises(ConfigError, match="shard takes a rank from 0"):
        made(ByHead()).shard(rank, size)


def test_a_part_is_not_divided_again() -> None:
    with pytest.raises(ConfigError, match="of rank 1 of 2 already"):
        made(ByHead()).shard(1, 2).shard(0, 2)
