from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.config import array, config_dict, options_of
from kvcompress.errors import ConfigError


@frozen(kw_only=True)
class Coded:
    codebook: Any = array("The codebook.")


@pytest.mark.parametrize(
    "given",
    [
        np.array([[1, 2], [3, 4]]),
        np.array([[1, 2], [3, 4]], dtype=np.float64),
        mx.array([[1, 2], [3, 4]], dtype=mx.int32),
        mx.array([[1, 2], [3, 4]], dtype=mx.bfloat16),
        [[1, 2], [3.0, 4]],
    ],
)
def test_arrays_of_any_make_become_the_same_read_only_float32(given: Any) -> None:
    made = Coded(codebook=given)
    assert made.codebook.dtype == np.float32
    assert made.codebook.tolist() == [[1, 2], [3, 4]]
    assert made == Coded(codebook=[[1, 2], [3, 4]])
    assert hash(made) == hash(Coded(codebook=[[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="read-only"):
        made.codebook[0, 0] = 7


def test_the_array_is_a_copy() -> None:
    given = np.ones((2, 2), dtype=np.float32)
    made = Coded(codebook=given)
    given[0, 0] = 7
    assert made.codebook[0, 0] == 1


@pytest.mark.parametrize(
    "bad",
    [
        "codebook.npy",
        [[1, 2], [3]],
        [],
        [float("nan")],
        [1e300],
        [True, False],
        ["a"],
        [1j],
        3j,
        4.0,
        {"a": 1},
        object(),
        mx.float32,
    ],
)
def test_what_is_no_array_of_finite_numbers_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="Coded: codebook must be an array of finite numbers"):
        Coded(codebook=bad)


def test_a_bad_array_is_shown_by_its_shape() -> None:
    with pytest.raises(ConfigError, match=r"\(got an array of shape \(2, 1\)\)"):
        Coded(codebook=np.array([[np.inf], [1]]))


def test_words_name_a_file_which_is_read(tmp_path: Path) -> None:
    (option,) = options_of(Coded)
    np.save(tmp_path / "book.npy", np.eye(3))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "archive.npy").write_bytes(b"PK\x03\x04 and no more")
    assert option.parse(str(tmp_path / "book.npy")).tolist() == np.eye(3).tolist()
    assert option.parse("none") is None
    for name in ("missing.npy", "pickled.npy", "empty.npy", "archive.npy"):
        with pytest.raises(ConfigError, match="codebook must be an array"):
            option.parse(str(tmp_path / name))


@given(st.data())
def test_the_json_form_tells_arrays_apart(data: st.DataObject) -> None:
    (option,) = options_of(Coded)
    first, second = (Coded(codebook=data.draw(option.strategy())) for _ in range(2))
    assert (first == second) == (config_dict(first) == config_dict(second))


@frozen(kw_only=True)
class Worded:
    codebook: Any = array("The codebook.", words=("random",))


def test_a_word_is_legal_in_an_arrays_place_where_it_is_declared() -> None:
    made = Worded(codebook="random")
    assert made.codebook == "random"
    assert config_dict(made) == {"codebook": "random"}
    assert made == Worded(codebook="random")
    assert made != Worded(codebook=[1.0])
    (option,) = options_of(Worded)
    assert option.parse("random") == "random"
    assert option.decode("random") == "random"
    with pytest.raises(ConfigError, match=r"codebook must be 'random' or an array.*got 'ran'"):
        Worded(codebook="ran")
