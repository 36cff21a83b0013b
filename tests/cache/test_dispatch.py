from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from kvcompress.cache import dispatch
from kvcompress.cache.dispatch import install
from kvcompress.cache.view import view
from tests.zoo import logits, tiny

MODEL_FILE = """
from mlx.nn.layers.base import Module

def scaled_dot_product_attention(*args, **kwargs):
    return args, kwargs

class Model(Module):
    def attend(self, *args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)
"""
Q, X = mx.zeros((1, 2, 3, 4)), mx.ones((1, 2, 3, 4))


class Step:
    def attend(self, queries: mx.array, **call: Any) -> Any:
        return "attended", queries, call


@pytest.fixture
def family() -> Iterator[ModuleType]:
    module = ModuleType("tests_family")
    exec(MODEL_FILE, vars(module))
    module.Model.__module__ = module.__name__
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def pair(step: Any = None) -> tuple[mx.array, mx.array]:
    step = step or Step()
    return view(X, step, "key"), view(X, step, "value")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"cache": None, "scale": 0.5, "mask": "causal"}),
        ((None, 0.5, "causal"), {}),
        ((None,), {"scale": 0.5, "mask": "causal", "sinks": Q}),
        ((None, 0.5, "causal", Q), {}),
    ],
)
def test_a_pair_of_views_attends_however_it_is_called(
    family: ModuleType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    lease = install(family.Model())
    keys, values = pair()
    said, queries, call = family.Model().attend(Q, keys, values, *args, **kwargs)
    assert said == "attended"
    assert queries is Q
    sinks = Q if args[3:] or "sinks" in kwargs else None
    assert call == {"scale": 0.5, "mask": "causal", "sinks": sinks}
    lease.release()


def test_the_first_three_arguments_may_be_named(family: ModuleType) -> None:
    lease = install(family.Model())
    keys, values = pair()
    out = family.Model().attend(queries=Q, keys=keys, values=values, cache=None, scale=1.0)
    assert out[0] == "attended"
    lease.release()


def test_everything_else_reaches_the_original_untouched(family: ModuleType) -> None:
    lease = install(family.Model())
    keys, values = pair()
    other_keys, _ = pair()
    for k, v in ((X, X), (values, keys), (keys, keys), (other_keys, values), (keys, X), (X, keys)):
        args, kwargs = family.Model().attend(Q, k, v, "cache", scale=0.5, mask=None)
        assert [id(a) for a in args] == [id(a) for a in (Q, k, v, args[3])]
        assert args[3] == "cache"
        assert kwargs == {"scale": 0.5, "mask": None}
    lease.release()


def test_an_argument_from_a_later_mlx_lm_is_served_by_dense_arrays(family: ModuleType) -> None:
    lease = install(family.Model())
    keys, values = pair()
    _, kwargs = family.Model().attend(Q, keys, values, None, scale=1.0, mask=None, bias=3)
    assert kwargs == {"scale": 1.0, "mask": None, "bias": 3}
    lease.release()


def test_the_last_lease_restores_the_very_object(family: ModuleType) -> None:
    original = family.scaled_dot_product_attention
    first, second = install(family.Model()), install(family.Model())
    hook = family.scaled_dot_product_attention
    assert hook is not original
    first.release()
    first.release()
    assert family.scaled_dot_product_attention is hook
    second.release()
    assert family.scaled_dot_product_attention is original
    install(family.Model()).release()
    assert family.scaled_dot_product_attention is original


def test_a_lease_nobody_holds_any_more_restores_too(family: ModuleType) -> None:
    original = family.scaled_dot_product_attention
    lease = install(family.Model())
    twin = copy.deepcopy({"lease": lease})["lease"]
    assert twin is lease
    del twin
    assert family.scaled_dot_product_attention is not original
    del lease
    gc.collect()
    assert family.scaled_dot_product_attention is original


def test_a_lease_collected_amid_an_installation_is_settled_afterwards(family: ModuleType) -> None:
    original = family.scaled_dot_product_attention
    lease = install(family.Model())
    with dispatch._lock:  # as when garbage collection strikes inside install()
        del lease
        gc.collect()
        assert family.scaled_dot_product_attention is not original
    install(tiny("llama")).release()
    assert family.scaled_dot_product_attention is original


def test_what_somebody_else_put_there_stays(family: ModuleType) -> None:
    original = family.scaled_dot_product_attention
    lease = install(family.Model())
    ours = family.scaled_dot_product_attention

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    family.scaled_dot_product_attention = theirs
    assert family.Model().attend(Q, *pair(), scale=1.0)[0] == "attended"
    lease.release()
    assert family.scaled_dot_product_attention is theirs
    again = install(family.Model())
    assert family.Model().attend(Q, *pair(), scale=1.0)[0] == "attended"
    again.release()
    assert family.scaled_dot_product_attention is theirs
    # They put back what they had found, which was ours and is out of use by now.
    family.scaled_dot_product_attention = ours
    assert family.Model().attend(Q, X, X, scale=1.0)[1] == {"scale": 1.0}
    install(family.Model()).release()
    assert family.scaled_dot_product_attention is original


def test_attention_inherited_from_another_family_is_hooked(family: ModuleType) -> None:
    class Heir(family.Model):  # type: ignore[name-defined,misc]
        pass

    lease = install(Heir())
    assert Heir().attend(Q, *pair(), scale=1.0)[0] == "attended"
    lease.release()


def test_a_model_file_outside_the_table_of_modules_is_hooked(family: ModuleType) -> None:
    namespace: dict[str, Any] = {"__name__": "loaded_by_path"}
    exec(MODEL_FILE, namespace)
    original = namespace["scaled_dot_product_attention"]
    lease = install(namespace["Model"]())
    assert namespace["Model"]().attend(Q, *pair(), scale=1.0)[0] == "attended"
    lease.release()
    assert namespace["scaled_dot_product_attention"] is original


def test_a_model_without_the_call_has_an_empty_lease() -> None:
    install(Module()).release()


def test_plain_caches_compute_the_same_bits_while_a_model_is_hooked() -> None:
    model = tiny("llama")
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = logits(model, tokens)
    lease = install(model)
    assert mx.array_equal(logits(model, tokens), before)
    lease.release()


def test_threads_that_come_and_go_leave_the_original(family: ModuleType) -> None:
    original = family.scaled_dot_product_attention
    wrong: list[object] = []

    def come_and_go() -> None:
        for turn in range(100):
            lease = install(family.Model())
            out = family.Model().attend(Q, *pair(), scale=1.0)
            if out[0] != "attended":
                wrong.append(out)
            if turn % 2:
                lease.release()
            del lease

    threads = [threading.Thread(target=come_and_go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert family.scaled_dot_product_attention is original
