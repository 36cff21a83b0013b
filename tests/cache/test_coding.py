from __future__ import annotations

import mlx.core as mx
import pytest

from kvcompress.cache.coding import Coding
from kvcompress.cache.store import CodeStore, ExactRows
from kvcompress.codec import Codes, KVCodec
from tests.stand_ins import LAYER, StandIn, tokens


def sizes_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of ``encode`` gets."""
    sizes: list[int] = []
    encode = KVCodec.encode

    def spied(self: KVCodec, keys: mx.array, *rest: object) -> Codes:
        sizes.append(keys.shape[2])
        return encode(self, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCodec, "encode", spied)
    return sizes


@pytest.mark.parametrize("choosing", [False, True])
def test_rows_between_the_sinks_and_the_rest_become_codes(
    choosing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, k, v = tokens(5000)
    method = StandIn(marked=choosing, careful_fraction=0.3 if choosing else 1.0, warmup=10)
    codec = method.bind(LAYER)
    sizes = sizes_of(monkeypatch)
    exact = ExactRows(received=mx.zeros((1, 1, 5000, 1)) if choosing else None)
    store = CodeStore(codec.schema)
    coding = Coding(codec, sinks=4, block=8, steady=100)
    constants = coding.code(exact, store, {}, k, v, 4803)  # as after a trim into a block
    assert store.tokens == 4803
    assert sizes == [2048, 2048, 707]
    wanted = codec.begin(k[:, :, 4:14], v[:, :, 4:14], range(4, 14))
    assert all(mx.array_equal(constants[name], array) for name, array in wanted.items())
    rows, _ = exact.rows()
    assert mx.array_equal(rows, mx.concatenate([k[:, :, :4], k[:, :, 4807:]], axis=2))
    assert (exact.received is not None) == choosing
    if exact.received is not None:
        assert exact.received.shape == (1, 1, 197, 1)

    sizes.clear()
    more_k, more_v = (mx.concatenate([x[:, :, :4], x[:, :, :3000]], axis=2) for x in (k, v))
    if choosing:
        exact.received = mx.zeros((1, 1, 3004, 1))
    again = coding.code(exact, store, constants, more_k, more_v, 4803 + 2501)
    assert again is constants
    assert store.tokens == 7304
    # Where tokens are chosen among, the first piece ends with a block.
    assert sizes == ([2045, 456] if choosing else [2048, 453])
    codes = codec.encode(k[:, :, :2501], v[:, :, :2501], range(4807, 7308), constants)
    stored = mx.concatenate([f["k.steps"] for f, _ in store.blocks()], axis=2)
    assert mx.array_equal(stored[:, :, 4803:], codes.fields["k.steps"])
