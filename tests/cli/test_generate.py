from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from kvcompress import get_method
from kvcompress.cli.generate import _statistics
from kvcompress.models import load_model
from kvcompress.models.room import CPU_CACHE_BYTES
from tests.cli.models import call, peak, tiny_is_embedded, tiny_model
from tests.zoo import tiny

__all__ = ["peak", "tiny_is_embedded", "tiny_model"]


def greedy(model: Any, tokenizer: Any, ids: list[int], count: int) -> str:
    """What the model goes on with, by the plainest loop there is."""
    import mlx.core as mx

    start = len(ids)
    for _ in range(count):
        ids = [*ids, int(mx.argmax(model(mx.array([ids]))[0, -1]).item())]
        if ids[-1] in tokenizer.eos_token_ids:
            break
    return str(tokenizer.decode(ids[start:]))


def test_text_goes_to_stdout_and_numbers_to_stderr(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--method", "fp16", "--prompt", "The yield", "--raw")
    code, out, err = call(capsys, "generate", *words, "--max-tokens", "12")
    assert code == 0
    loaded = load_model(tiny_model)
    ids = loaded.tokenizer.encode("The yield")
    assert out == greedy(loaded.model, loaded.tokenizer, ids, 12) + "\n"
    assert err.count("\n") == 1
    assert re.fullmatch(
        rf"prompt {len(ids)} tokens, [\d.]+ tokens/s; text 12 tokens, [\d.]+ tokens/s; "
        r"cache 0.26 MB, [\d.]+ times a float16 cache of so few tokens: .*\n",
        err,
    )


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="MLX chooses by itself on a GPU")
def test_freed_memory_is_kept_as_where_methods_are_compared(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--method", "fp16", "--prompt", "The yield", "--raw")
    assert call(capsys, "generate", *words, "--max-tokens", "1")[0] == 0
    assert mx.set_cache_limit(CPU_CACHE_BYTES) == CPU_CACHE_BYTES


def test_room_for_tokens_to_come_is_told_apart(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--prompt", "The yield", "--raw", "--max-tokens", "12")
    code, _, err = call(capsys, "generate", *words)
    assert code == 0
    found = re.search(r"cache ([\d.]+) MB, ([\d.]+) MB of it room for tokens to come, ", err)
    assert found
    assert 0 < float(found[2]) < float(found[1])


def test_the_numbers_are_those_of_bundled_caches_too() -> None:
    model = tiny("falcon_h1")
    caches = get_method("turboquant", bits=2, window=8).make_cache(model)
    mx.eval(model(mx.ones((1, 400), mx.int32), cache=caches), [cache.state for cache in caches])
    last = SimpleNamespace(prompt_tokens=0, prompt_tps=0, generation_tokens=0, generation_tps=0)
    found = re.search(r"([\d.]+) times smaller than float16", _statistics(last, caches, model))
    assert found
    assert float(found[1]) > 1.5


def test_a_window_beyond_the_text_changes_nothing(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--prompt", "Objects are", "--max-tokens", "20")
    plain = call(capsys, "generate", *words, "--method", "fp16")
    exact = call(capsys, "generate", *words, "--method", "turboquant:window=500")
    assert plain[:2] == exact[:2]
    assert plain[1].strip()


def test_the_chat_template_is_used_unless_raw(
    capsys: pytest.CaptureFixture[str], tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", tiny_model, "--method", "affine", "--max-tokens", "1", "--prompt", "-")

    def prompt_tokens(*more: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there"))
        code, _, err = call(capsys, "generate", *words, *more)
        assert code == 0
        return int(err.split()[1])

    tokenizer = load_model(tiny_model).tokenizer
    assert prompt_tokens("--raw") == len(tokenizer.encode("Hello there"))
    assert prompt_tokens() == len(tokenizer.encode("[user]Hello there[reply]"))


def test_a_seed_fixes_what_chance_decides(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--method", "affine", "--prompt", "Names", "--temp", "1")
    texts = [
        call(capsys, "generate", *words, "--max-tokens", "16", "--seed", seed)[1] for seed in "334"
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_embedded_model_is_calibrated_where_a_method_lacks_it(
    capsys: pytest.CaptureFixture[str],
    tiny_model: str,
    peak: None,
    tiny_is_embedded: None,
) -> None:
    words = ("--model", tiny_model, "--prompt", "Objects are", "--max-tokens", "8")
    first = call(capsys, "generate", *words, "--method", "peak:window=1")
    again = call(capsys, "generate", *words, "--method", "peak:window=1")
    untouched = call(capsys, "generate", *words, "--method", "turboquant")
    assert (first[0], again[0], untouched[0]) == (0, 0, 0)
    assert first[1] == again[1] != ""
    assert "fitting peak bits=8" in first[2]
    assert again[2].count("\n") == untouched[2].count("\n") == 1  # what was made is kept


def test_another_model_without_calibration_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], tiny_model: str, peak: None
) -> None:
    words = ("--model", tiny_model, "--prompt", "Objects are", "--method", "peak")
    code, out, err = call(capsys, "generate", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: peak: needs a calibration and was given none; run: kvcompress")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--prompt", "x", "--method", "nobody"), "no method named 'nobody'"),
        (("--prompt", "x", "--method", "affine:bits=2,4"), "stands for 2 configurations"),
        (("--prompt", "  "), "--prompt holds no text"),
        (
            ("--prompt", "word " * 5000, "--raw"),
            "15001 tokens are more than the model's 4096 positions",
        ),
    ],
)
def test_mistakes_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], tiny_model: str, words: tuple[str, ...], text: str
) -> None:
    code, out, err = call(capsys, "generate", *words, "--model", tiny_model)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("seed", ["-5", str(2**64)])
def test_a_seed_that_mlx_cannot_take_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: str, seed: str
) -> None:
    words = ("--model", tiny_model, "--prompt", "x", "--method", "affine", "--seed", seed)
    code, out, err = call(capsys, "generate", *words)
    assert (code, out) == (2, "")
    assert "'--seed'" in err
