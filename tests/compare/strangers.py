"""Methods, a metric and a workload of a distribution that kvcompress knows nothing of."""

from __future__ import annotations

HOOKS = """
from kvcompress import MethodInfo, hookimpl

NAMES = ("plain", "crash", "hang", "needy", "quits", "nonsense", "rows", "misfit")

@hookimpl
def kvcompress_register(registry):
    for name in NAMES:
        registry.add(MethodInfo(name, "A stranger.", f"stranger_code:{name.title()}"))

@hookimpl
def kvcompress_metrics():
    from kvcompress.compare import Metric
    def worst(full, method, targets):
        return abs(full - method).max(axis=-1)
    return {"worst": Metric("worst", worst, "largest change of a log-probability")}

@hookimpl
def kvcompress_workloads():
    from kvcompress.compare import Workload
    def length(session, tokenizer, protocol):
        session.prefill(tokenizer.encode("one two three"))
        return session.caches[0].offset
    return {"length": Workload("length", length, "tokens of three words")}
"""

CODE = '''
import os, signal, sys, time
from typing import Any, ClassVar
from attrs import frozen
from kvcompress import CalibrationRequired, Method
from kvcompress.calibrate import calibration_of
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import integer
from kvcompress.method import calibration_field
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.rope import PreRope
from kvcompress.stages.shared import shared_table
from kvcompress.stages.transform import Identity
from kvcompress.stages.vq_coder import VQCoder

@frozen(kw_only=True)
class Plain(Method):
    name: ClassVar[str] = "plain"

    def bind(self, layer):
        raise NotImplementedError

    def make_cache(self, model):
        from mlx_lm.models.cache import make_prompt_cache
        return make_prompt_cache(model)

@frozen(kw_only=True)
class Crash(Plain):
    name: ClassVar[str] = "crash"

    def make_cache(self, model):
        print("about to fall over", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

@frozen(kw_only=True)
class Hang(Plain):
    name: ClassVar[str] = "hang"

    def make_cache(self, model):
        time.sleep(1000)

@frozen(kw_only=True)
class Needy(Plain):
    name: ClassVar[str] = "needy"

    def check(self):
        raise CalibrationRequired("needy: make one with `kvcompress calibrate needy`")

@frozen(kw_only=True)
class Quits(Plain):
    name: ClassVar[str] = "quits"

    def make_cache(self, model):
        sys.exit(3)

@frozen(kw_only=True)
class Nonsense(Plain):
    name: ClassVar[str] = "nonsense"

    def make_cache(self, model):
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        class Broken(KVCache):
            def update_and_fetch(self, keys, values):
                keys, values = super().update_and_fetch(keys, values)
                return keys, values * float("nan")

        return [Broken() for _ in model.layers]

@frozen(kw_only=True)
class Rows(Method):
    """The first rows of the sample are the codebook."""

    name: ClassVar[str] = "rows"
    fit_options: ClassVar[tuple[str, ...]] = ("entries",)
    entries: int = integer(16, choices=(4, 16), help="Rows of the codebook.")
    calibration: Any = calibration_field()

    def fit(self, samples, *, seed):
        parts = {"keys": samples.keys, "values": samples.values}
        return {k: rows[: self.entries].swapaxes(0, 1)[:, None] for k, rows in parts.items()}

    def bind(self, layer):
        tables = calibration_of(self).tables(self, layer)
        coders = {k: VQCoder(ProductVQ(shared_table(tables[k])), layer.kv_heads) for k in tables}
        pipelines = {k: Pipeline(Identity(coders[k].quantiser.dim), coders[k]) for k in coders}
        return KVCodec(layer, pipelines["keys"], pipelines["values"], PreRope())

@frozen(kw_only=True)
class Misfit(Rows):
    name: ClassVar[str] = "misfit"

    def fit(self, samples, *, seed):
        raise ArithmeticError("these tokens\\n are not to its taste")
'''

NAMES = ("plain", "crash", "hang", "needy", "quits", "nonsense", "rows", "misfit")
ENTRY_POINTS = dict.fromkeys(NAMES, "stranger")
