"""Keys, values and queries that a model makes of a text, as cases for comparing scores."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
import numpy as np

from kvcompress.calibrate.capture import record
from kvcompress.calibrate.recorder import SKIP
from kvcompress.calibrate.samples import LayerSamples, rotated
from kvcompress.calibrate.windows import WINDOW, text_windows
from kvcompress.compare.score_cases import RECENT, Case
from kvcompress.errors import ConfigError
from kvcompress.models import LoadedModel
from kvcompress.text import Text

TOKENS: Final = (400, 1000)
LAYERS: Final = 4
FITTED_TO: Final = 4 * WINDOW


def recorded_cases(loaded: LoadedModel, text: Text, fit_text: Text) -> dict[int, list[Case]]:
    """Cases by their number of tokens, one a layer, of a few layers spread over the model.

    Keys and queries are those of the text's beginning; the queries are those of its last tokens.
    Tables are fitted to another text.

    Args:
        loaded: The model.
        text: What is scored.
        fit_text: What tables are fitted to.

    Raises:
        ConfigError: A text is too short.
        UnsupportedModel: No layer of the model can be compressed.
    """
    longest = max(TOKENS) + SKIP
    window = text_windows(loaded.tokenizer, text, longest, longest)[0]
    if len(window) < longest:
        raise ConfigError(
            f"compare: workload recorded reads {longest} tokens (the text {text.name!r} has "
            f"{len(window)}); give a longer text with --text"
        )
    scored = _few(record(loaded.model, [window]))
    fit = _few(record(loaded.model, text_windows(loaded.tokenizer, fit_text, FITTED_TO)))
    return {
        tokens: [_case(one, samples, tokens) for one, samples in zip(scored, fit, strict=True)]
        for tokens in TOKENS
    }


def _few(samples: list[LayerSamples]) -> list[LayerSamples]:
    places = np.linspace(0, len(samples) - 1, min(LAYERS, len(samples)))
    return [samples[place] for place in places.round().astype(int)]


def _case(scored: LayerSamples, samples: LayerSamples, tokens: int) -> Case:
    layer = scored.layer
    keys, values = scored.keys[:tokens], scored.values[:tokens]
    heads = scored.queries[:tokens].reshape(tokens, layer.query_heads, layer.head_dim)
    # A window's first tokens are not recorded; the others move up by as many positions.
    queries = _rows(rotated(heads, layer, range(tokens)))
    return Case(
        name=f"layer {layer.index}",
        layer=layer,
        keys=_rows(rotated(keys, layer, range(tokens))).astype(layer.mx_dtype),
        values=_rows(values).astype(layer.mx_dtype),
        queries=queries[:, :, tokens - RECENT :],
        samples=samples,
        seed=0,
        earlier=queries[:, :, : tokens - RECENT],
    )


def _rows(rows: Any) -> mx.array:
    """``(N, H, D)`` to ``(1, H, N, D)``."""
    return mx.array(rows).swapaxes(0, 1)[None]
