from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from kvcompress.cache.step import Step
from kvcompress.compare.fitted import samples_of
from kvcompress.compare.score_cases import Case
from kvcompress.compare.score_errors import score_errors
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.rope import PreRope
from kvcompress.stages.windowed import WindowedRope
from tests.stand_ins import StandIn, tokens

LAYER = LayerSpec(
    kv_heads=2,
    query_heads=6,
    head_dim=32,
    value_dim=16,
    dtype="float32",
    rotary=Rotary(32, base=1e4),
)
COUNT, QUERIES = 90, 5
KINDS = ("all", "recent", "older", "age 16", "age 32", "age 64")


@pytest.fixture(scope="module")
def case() -> Case:
    q, k, v = tokens(COUNT, LAYER, seed=4)
    last = COUNT - QUERIES
    return Case("made", LAYER, k, v, q[:, :, last:], samples_of(LAYER, k, v, q), 0)


def method(**options: Any) -> Any:
    return StandIn(**{"window": 16, "sinks": 3, "steps": 2.0, "rope": PreRope(), **options})


def turned(rows: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Half-split pairs of rows turned by angles."""
    a, b = rows[..., :16], rows[..., 16:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


def expected(case: Case, span: range, constant: int | None) -> dict[str, float]:
    """The measures by loops over single scores, for keys rounded to halves before RoPE."""
    theta = 10000.0 ** (-np.arange(16) / 16)
    errors: dict[str, list[float]] = {name: [] for name in (*KINDS, "exact")}
    keys = np.array(case.keys)[0].astype(np.float64)
    for head in range(6):
        for row in range(QUERIES):
            i = COUNT - QUERIES + row
            q = np.array(case.queries)[0, head, row].astype(np.float64)
            for j in range(i + 1):
                key = keys[head // 3, j]
                plain = turned(key, -j * theta)
                coded = np.round(plain * 2) / 2
                true = q @ key
                exact = q @ turned(coded, j * theta) if j in span else true
                score = exact
                if j in span and constant is not None:
                    score = turned(turned(q, -i * theta), constant * theta) @ coded
                errors["all"].append((score - true) ** 2 / 32)
                errors["exact"].append((exact - true) ** 2 / 32)
                kinds = (
                    ["recent"] if i - j < 16 else ["older", f"age {1 << (i - j).bit_length() - 1}"]
                )
                for kind in kinds:
                    errors[kind].append(errors["all"][-1])
    return {name: float(np.mean(values)) for name, values in errors.items()}


@pytest.mark.parametrize("constant", [None, 40])
def test_errors_are_those_of_a_loop_over_scores(case: Case, constant: int | None) -> None:
    rope = PreRope() if constant is None else WindowedRope(constant=constant)
    measured = score_errors(method(rope=rope), case)
    # 85 tokens were there when the queries came: 3 first, 16 last, and what fills no block of 8.
    assert measured["coded"] == 64
    wanted = expected(case, range(3, 67), constant)
    assert measured["recent"] == wanted["recent"] == 0
    wanted["exact_rope"] = wanted.pop("exact")
    for name, value in wanted.items():
        assert measured[name] == pytest.approx(value, rel=1e-4)
    if constant is None:
        assert measured["all"] == pytest.approx(measured["exact_rope"], rel=1e-4)
    else:
        assert measured["all"] > 2 * measured["exact_rope"]


def test_the_error_of_keys_is_that_of_the_coded_ones(case: Case) -> None:
    measured = score_errors(method(), case)
    plain = np.array(LAYER.rotary.unrotate(case.keys, range(COUNT)))[:, :, 3:67]
    assert measured["key_error"] == pytest.approx(
        np.square(np.round(plain * 2) / 2 - plain).mean(), rel=1e-4
    )


def test_recent_scores_are_the_same_under_every_rope(case: Case) -> None:
    policies = (PreRope(), WindowedRope(first=16), WindowedRope(constant=2048))
    recent = [score_errors(method(rope=rope), case)["recent"] for rope in policies]
    assert recent == [0, 0, 0]


def test_recent_tokens_that_are_codes_count(case: Case) -> None:
    measured = score_errors(method(window=0, block=1), case)
    assert measured["recent"] > 0
    assert measured["coded"] == COUNT - QUERIES - 3


def test_nothing_coded_is_no_measurement(case: Case) -> None:
    with pytest.raises(ConfigError, match="of 90 tokens none is coded"):
        score_errors(method(window=100), case)


def test_half_precision_is_measured_against_the_keys_as_they_came(case: Case) -> None:
    layer = attrs.evolve(LAYER, dtype="float16")
    half = attrs.evolve(
        case,
        layer=layer,
        keys=case.keys.astype(mx.float16),
        values=case.values.astype(mx.float16),
    )
    measured = score_errors(method(), half)
    assert measured["recent"] == 0
    assert measured["all"] == pytest.approx(score_errors(method(), case)["all"], rel=0.05)


def test_earlier_queries_reach_the_cache_before_it_codes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, ...], float]] = []
    real = Step.attend

    def attend(self: Step, queries: mx.array, **options: Any) -> mx.array:
        seen.append((queries.shape, options["scale"]))
        return real(self, queries, **options)

    monkeypatch.setattr(Step, "attend", attend)
    q, _, _ = tokens(COUNT, LAYER, seed=4)
    measured = score_errors(method(), attrs.evolve(case, earlier=q[:, :, : COUNT - QUERIES]))
    assert seen == [((1, 6, COUNT - QUERIES, 32), 32**-0.5)]
    assert measured == score_errors(method(), case)  # it does not choose by what was asked for
