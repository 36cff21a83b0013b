from __future__ import annotations

from typing import Any

import numpy as np

from kvcompress.compare.fitted import fitted, samples_of
from tests.calibrate.fakes import Peak, Plain
from tests.stand_ins import LAYER, tokens


def samples(count: int = 40, first_query: int = 0) -> Any:
    q, k, v = tokens(count, seed=3)
    return samples_of(LAYER, k, v, q[:, :, first_query:], first_query), (q, k, v)


def test_every_token_is_sampled_and_turned_back() -> None:
    made, (q, k, v) = samples()
    plain = LAYER.rotary.unrotate(k, range(40))
    assert np.allclose(made.keys.swapaxes(0, 1), plain[0], atol=1e-5)
    assert np.array_equal(made.values.swapaxes(0, 1), np.array(v[0]))
    assert np.array_equal(made.positions, np.arange(40))
    assert np.allclose(made.post_keys().swapaxes(0, 1), k[0], atol=1e-5)
    queries = LAYER.rotary.unrotate(q, range(40))[0]
    assert np.allclose(
        made.queries.transpose(1, 2, 0, 3).reshape(queries.shape), queries, atol=1e-5
    )
    assert (made.moments.tokens, made.moments.queries) == (40, 40 * LAYER.group)


def test_queries_may_stand_at_the_end_alone() -> None:
    made, (q, _, _) = samples(first_query=39)
    assert made.query_positions.tolist() == [39]
    last = LAYER.rotary.unrotate(q[:, :, 39:], range(39, 40))[0, :, 0]
    assert np.allclose(made.queries[0].reshape(last.shape), last, atol=1e-5)
    assert np.allclose(
        made.moments.query_moment,
        np.einsum("hga,hgb->hab", made.queries[0], made.queries[0]) / LAYER.group,
        atol=1e-4,
    )


def test_tables_are_the_methods_own_and_the_same_every_time() -> None:
    method = Peak(bits=4)
    made, _ = samples()
    first, second = fitted(method, [made]), fitted(method, [made])
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != fitted(method, [made], seed=1).fingerprint
    tables = first.tables(method, LAYER)
    assert np.allclose(tables["key_steps"], 2 * made.moments.post_key_max / 8)


def test_a_method_that_fits_nothing_gets_the_moments() -> None:
    made, _ = samples()
    calibration = fitted(Plain(), [made])
    assert calibration.fits == ()
    assert calibration.moments(LAYER) is made.moments
