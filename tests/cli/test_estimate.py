from __future__ import annotations

import json

import pytest

from tests.cli.models import call, peak, tiny_model

__all__ = ["peak", "tiny_model"]


def test_the_table_has_a_row_a_configuration(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("fp16", "turboquant:bits=2,4", "--model", tiny_model, "--context", "1000")
    code, out, err = call(capsys, "estimate", *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["method", "keys", "values", "exact"]
    assert [line.split()[0] for line in lines[1:4]] == [
        "fp16",
        "turboquant:bits=2",
        "turboquant:bits=4",
    ]
    assert lines[1].split()[-1] == "0.50x"


def test_json_has_bytes_and_the_largest_context(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("fp16", "affine", "--model", tiny_model, "--context", "1000", "--json")
    code, out, _ = call(capsys, "estimate", *words, "--dtype", "float16", "--memory", "1MiB")
    assert code == 0
    plain, affine = json.loads(out)
    token = 2 * 2 * 2 * 32 * 2
    assert plain["total_bytes"] == plain["plain_bytes"] == plain["fp16_bytes"] == 1000 * token
    assert plain["largest_context"] == 2**20 // token
    assert affine["times_smaller"] == affine["fp16_bytes"] / (
        affine["key_bytes"] + affine["value_bytes"] + affine["exact_bytes"]
    )
    assert affine["largest_context"] > plain["largest_context"]


def test_a_method_that_is_not_calibrated_yet_has_its_bytes(
    capsys: pytest.CaptureFixture[str], tiny_model: str, peak: None
) -> None:
    code, out, err = call(capsys, "estimate", "peak", "--model", tiny_model, "--json")
    assert (code, err) == (0, "")
    [row] = json.loads(out)
    assert row["key_bytes"] > 0
    # Steps of keys and of values, float32 and float16, and the mean of the keys.
    assert row["table_bytes"] == 2 * 2 * 32 * (4 + 4 + 4)


@pytest.mark.parametrize(
    ("size", "tokens"), [("1GB", 10**9), ("1GiB", 2**30), ("1.5 MB", 1_500_000), ("70000", 70_000)]
)
def test_sizes_are_read_as_people_write_them(
    capsys: pytest.CaptureFixture[str], tiny_model: str, size: str, tokens: int
) -> None:
    words = ("fp16", "--model", tiny_model, "--dtype", "float16", "--memory", size, "--json")
    _, out, _ = call(capsys, "estimate", *words)
    assert json.loads(out)[0]["largest_context"] == tokens // 512


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nobody",), "no method named 'nobody'"),
        (("affine:bits=9",), "affine: bits must be"),
        (("affine", "--memory", "much"), "--memory must be a size such as 8GB"),
        (("affine", "--context", "0"), "--context must be at least 1"),
        (("affine", "--dtype", "int8"), "dtype must be one of"),
    ],
)
def test_mistakes_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], tiny_model: str, words: tuple[str, ...], text: str
) -> None:
    code, out, err = call(capsys, "estimate", *words, "--model", tiny_model)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1
