"""``kvcompress generate``: write text with a compressed cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvcompress.cli.chosen import CalibrationFile, MethodWords, ModelName, chosen_method
from kvcompress.errors import ConfigError


def generate(
    prompt: Annotated[str, typer.Option(help="What to answer; - reads it from stdin.")],
    method: MethodWords = "turboquant",
    model: ModelName = "smollm2-135m",
    dtype: Annotated[
        str | None, typer.Option(help="Cast the model to float32, float16 or bfloat16.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    temp: Annotated[
        float, typer.Option(min=0.0, help="Temperature; 0 takes the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Seed of the random choices.")] = 0,
    raw: Annotated[
        bool, typer.Option(help="Go on from the prompt as it is, without the chat template.")
    ] = False,
    calibration: CalibrationFile = None,
) -> None:
    """Write text with a method's cache; the text goes to stdout, one line of numbers to stderr."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before anything imports mlx

    from kvcompress.compare.positions import check_positions
    from kvcompress.models import load_model
    from kvcompress.models.room import keep_freed_memory

    words = sys.stdin.read() if prompt == "-" else prompt
    if not words.strip():
        raise ConfigError("generate: --prompt holds no text")
    keep_freed_memory()
    chosen = chosen_method(method, calibration, model)
    loaded = load_model(model, dtype)
    ids = _encode(loaded.tokenizer, words, raw)
    check_positions(loaded.model, len(ids), "generate: --prompt", "give a shorter one")

    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    mx.random.seed(seed)
    caches = chosen.make_cache(loaded.model)
    sampler = make_sampler(temp)
    last: Any = None
    for last in stream_generate(
        loaded.model,
        loaded.tokenizer,
        ids,
        max_tokens=max_tokens,
        sampler=sampler,
        prompt_cache=caches,
    ):
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    print(_statistics(last, caches, loaded.model), file=sys.stderr)


def _encode(tokenizer: Any, words: str, raw: bool) -> list[int]:
    if raw or not tokenizer.has_chat_template:
        return list(tokenizer.encode(words))
    messages = [{"role": "user", "content": words}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def _statistics(last: Any, caches: list[Any], model: Any) -> str:
    from kvcompress.cache.nested import leaves
    from kvcompress.compare.memory import memory_measures

    tokens = max(getattr(cache, "offset", 0) for cache in leaves(caches))
    size = _size(memory_measures(caches, model, tokens))
    return (
        f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s; "
        f"text {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s; {size}"
    )


def _size(measured: Mapping[str, Any]) -> str:
    """What the cache takes, and why it may be more than a plain one so early in a text."""
    held, room = measured["resident_bytes"], measured["reserved_bytes"]
    smaller = measured["times_smaller"]
    parts = [f"cache {held / 1e6:.2f} MB"]
    if room:
        parts.append(f"{room / 1e6:.2f} MB of it room for tokens to come")
    if smaller >= 1:
        parts.append(f"{smaller:.2f} times smaller than float16")
    else:
        parts.append(
            f"{1 / smaller:.1f} times a float16 cache of so few tokens: most are exact, in the "
            "model's own dtype"
        )
    return ", ".join(parts)
