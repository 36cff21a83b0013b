"""Laws of a method inside a model, with mlx-lm's own loops around it."""

from __future__ import annotations

import gc
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from kvcompress.attention import DEFAULT_BUDGET
from kvcompress.method import CompressionMethod
from kvcompress.testing.calibration import takes_calibration
from kvcompress.testing.law import Draw, law, numbers, require, require_equal
from kvcompress.testing.strategies import chunkings
from kvcompress.testing.subject import Subject

_PROMPT = 21
_LONG = 150
_MORE = 6
_PREFILL = 3072
_CHUNK = 512


@cache
def tiny_model() -> Any:
    """A Llama of three layers with made-up weights, the same every time."""
    from mlx.utils import tree_map
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            rms_norm_eps=1e-5,
            vocab_size=64,
        )
    )
    drawn = np.random.default_rng(11)

    def made_up(weight: mx.array) -> mx.array:
        size = 1.0 if weight.ndim == 1 else weight.shape[-1] ** -0.5
        return mx.array((size * drawn.standard_normal(weight.shape)).astype(np.float32))

    model.update(tree_map(made_up, model.parameters()))
    mx.eval(model.parameters())
    return model


def prompt(count: int, seed: int = 0) -> mx.array:
    """Made-up tokens, ``(1, count)``."""
    return mx.array(np.random.default_rng(seed).integers(0, 64, (1, count)))


def _peaks(caches: list[Any]) -> tuple[int, int]:
    """Bytes that half a long prompt, and all of it, take at most, caches included."""
    model, words = tiny_model(), prompt(_PREFILL)
    gc.collect()
    mx.synchronize()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    half = 0
    for start in range(0, _PREFILL, _CHUNK):
        model(words[:, start : start + _CHUNK], cache=caches)
        mx.eval([c.state for c in caches])
        if start < _PREFILL // 2:
            half = mx.get_peak_memory() - held
    return half, mx.get_peak_memory() - held


@cache
def _plain_peaks() -> tuple[int, int]:
    from mlx_lm.models.cache import make_prompt_cache

    return _peaks(make_prompt_cache(tiny_model()))


class ModelLaws(Subject):
    """Laws of caches that a model is given."""

    def _caches(self, **options: Any) -> list[Any]:
        return self.build(**options).make_cache(tiny_model())

    @law(share=0.1)
    def test_a_model_with_a_long_window_is_itself(self, draw: Draw) -> None:
        """Logits bit for bit those of the plain cache, whatever the chunks."""
        from mlx_lm.models.cache import make_prompt_cache

        model, words = tiny_model(), prompt(40, draw(st.integers(0, 99), "seed"))
        ours, plain, start = self._caches(window=_LONG), make_prompt_cache(model), 0
        for size in draw(chunkings(40), "chunks"):
            part = words[:, start : start + size]
            require_equal(model(part, cache=ours), model(part, cache=plain), f"logits at {start}")
            start += size

    @law(share=0.1)
    def test_a_model_reads_its_codes(self, draw: Draw) -> None:
        """Logits stay near the plain cache's, and every count goes on, with little exact."""
        from mlx_lm.models.cache import make_prompt_cache

        model, words = tiny_model(), prompt(_LONG, draw(st.integers(0, 99), "seed"))
        ours, plain, start = self._caches(window=8, block=16), make_prompt_cache(model), 0
        for size in [*draw(chunkings(_LONG - 8), "chunks"), *[1] * 8]:
            part = words[:, start : start + size]
            got, wanted = (numbers(model(part, cache=c)) for c in (ours, plain))
            start += size
            require({c.offset for c in ours} == {start}, f"offsets after {start} tokens")
        require(np.isfinite(got).all(), "logits are not finite")
        off = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        require(off < 1, f"logits are off by {off:.2f} of their size")

    def test_mlx_lm_generates_with_it(self) -> None:
        """A prompt longer than a prefill step, and ``kv_bits`` on top, which replaces caches."""
        from mlx_lm.generate import generate_step

        ours = self._caches(window=8, block=16, sinks=1)
        kinds = [type(c) for c in ours]
        bits = {} if self.can("plain") else {"kv_bits": 8, "quantized_kv_start": 0}
        made = [
            int(token)
            for token, _ in generate_step(
                prompt(_PROMPT)[0],
                tiny_model(),
                max_tokens=_MORE,
                prompt_cache=ours,
                prefill_step_size=4,
                **bits,
            )
        ]
        require(len(made) == _MORE, f"{len(made)} of {_MORE} tokens were made")
        require([type(c) for c in ours] == kinds, "kv_bits replaced the caches")
        for held in ours:
            full = held.size() == held.offset >= _PROMPT and not held.empty() and held.nbytes > 0
            require(full, f"{held} after {_PROMPT} tokens of prompt")

    def test_a_long_prompt_needs_one_tile_more(self) -> None:
        """Scoring a chunk against everything at once takes more memory than codes save.

        The peak lies at most a tile above the plain cache's, and grows no faster with length.
        """
        if self.can("plain"):
            pytest.skip(f"{self.method} compresses nothing")
        plain, ours = _plain_peaks(), _peaks(self._caches(window=64))
        require(
            ours[1] <= plain[1] + DEFAULT_BUDGET and ours[1] - ours[0] <= plain[1] - plain[0],
            f"{_PREFILL // 2} and {_PREFILL} tokens of prompt peak at {ours} bytes above the "
            f"model, plain caches at {plain}",
        )

    def test_conversations_have_caches_of_their_own(self) -> None:
        """A list that is handed out twice lets the second conversation go on from the first."""
        from kvcompress.cache import attach

        model, method = tiny_model(), self.build()
        first, second = method.make_cache(model), method.make_cache(model)
        with attach(model, method):
            lists = [first, second, model.make_cache(), model.make_cache()]
        every = [id(c) for caches in lists for c in caches]
        require(len(set(every)) == len(every), "two lists share a cache")
        mx.eval(model(prompt(_PROMPT), cache=first))
        require(all(c.empty() for c in second), "feeding one list fed another")

    def test_attaching_leaves_no_trace(self) -> None:
        """After it the model is what it was: no attribute, no hook, the same caches."""
        import sys

        from mlx_lm.models.cache import make_prompt_cache

        from kvcompress.cache import attach

        model, method = tiny_model(), self.build(window=8, block=16)
        module = sys.modules[type(model).__module__]
        before = (dict(vars(model)), vars(module)["scaled_dot_product_attention"])
        with attach(model, method):
            inside = make_prompt_cache(model)
            mx.eval(model(prompt(_PROMPT), cache=inside))
        kinds = [type(c) for c in inside]
        del inside
        require(dict(vars(model)) == before[0], "attributes are left on the model")
        now = [type(c).__name__ for c in make_prompt_cache(model)]
        require(set(now) == {"KVCache"}, f"the model makes {now}")
        if not self.can("plain"):
            require("KVCache" not in {kind.__name__ for kind in kinds}, "nothing was compressed")

    def test_skipped_layers_stay_plain(self) -> None:
        """``skip_layers`` counts layers from both ends."""
        if self.can("plain"):
            pytest.skip(f"{self.method} compresses no layer")
        kinds = [type(c).__name__ for c in self._caches(skip_layers=(1, 1))]
        require(kinds[0] == kinds[2] == "KVCache" != kinds[1], f"skip_layers=(1, 1) gives {kinds}")

    def _how_to_load(self, method: CompressionMethod) -> dict[str, Any]:
        """A registered method is made again from the file, given its calibration."""
        if not isinstance(self.method, str):
            return {"method": method}
        return {"calibration": self.calibration()} if takes_calibration(self.cls) else {}

    def test_saved_caches_go_on(self) -> None:
        """A file of caches takes up where it left off, packed as small as in memory."""
        if self.can("plain"):
            pytest.skip(f"{self.method} keeps mlx-lm's caches, which mlx-lm saves")
        from kvcompress.cache.persist import load_cache, save_cache

        model, words = tiny_model(), prompt(_LONG + _MORE)
        method = self.build(window=8, block=16)
        held = method.make_cache(model)
        mx.eval(model(words[:, :_LONG], cache=held))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "caches.safetensors"
            save_cache(path, held)
            stored = path.stat().st_size
            again = load_cache(path, model, **self._how_to_load(method))
        for place in range(_LONG, _LONG + _MORE):
            word = words[:, place : place + 1]
            require_equal(
                model(word, cache=again),
                model(word, cache=held),
                f"logits at {place}, loaded",
            )
        small = sum(c.nbytes for c in held) + 20_000
        require(stored <= small, f"the file takes {stored} bytes, the caches {small}")
