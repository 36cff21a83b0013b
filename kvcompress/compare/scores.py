"""Compare what methods make of attention's scores, on made-up or recorded keys."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvcompress.compare.methods import expand, method_of
from kvcompress.compare.provenance import distributions, machine, versions
from kvcompress.compare.report import one_line
from kvcompress.compare.runner import DEFAULT_TEXT
from kvcompress.compare.score_report import ScoreReport, ScoreRow
from kvcompress.errors import ConfigError
from kvcompress.models.embedded import NAME as EMBEDDED
from kvcompress.openblas import prefer_openblas
from kvcompress.text import load_text

if TYPE_CHECKING:
    from kvcompress.calibrate.calibration import Calibration
    from kvcompress.compare.score_cases import Case

_CODES: Final = "a2ats:codebook_bits=6:codebooks=layer"

SCORE_METHODS: Final = (
    f"{_CODES}:use_query_aware=false:rope=exact,banded,single",
    f"{_CODES}:use_query_aware=true:rope=exact",
)
"""What is compared when no method is named: forms of rope on the same codes, and both assignments.

Sub-vectors share one codebook: of a few hundred tokens, one for each would learn them by heart.
"""

CACHE: Final[Mapping[str, Any]] = {"window": 16, "sinks": 0, "block": 16}
"""Options of every method, unless its words say otherwise: few tokens are left out of the codes."""

RECORDED: Final = "recorded"
WORKLOADS: Final = ("local_recency", "long_range_dependent", RECORDED)

CALIBRATION_TEXT: Final = "prose-calibration"

Cases = Mapping[int, "Sequence[Case]"]
"""The cases of a workload by their number of tokens."""


def compare_scores(
    workloads: Iterable[str],
    methods: Iterable[str] = SCORE_METHODS,
    *,
    model: str = EMBEDDED,
    dtype: str | None = None,
    text: str = DEFAULT_TEXT,
    command: str = "",
) -> ScoreReport:
    """Measure methods on workloads, in this process.

    Each case is read through the method's cache and scored by its codec. Tables are fitted by the
    method's own ``fit``. A method that fails becomes a row that says so.

    Args:
        workloads: Names among :data:`WORKLOADS`.
        methods: Words for methods, ``name:option=value``; several values make several rows.
        model: Name of the model for ``recorded``; the others need none.
        dtype: Type to cast it to.
        text: What it reads: a built-in text, a file or a folder.
        command: The command line, for the record.

    Raises:
        ConfigError: There is no such workload, or a method's words are not legal.
        KVCompressError: There is no such method; or the model or the text cannot be had.
    """
    prefer_openblas()  # before anything imports mlx
    started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
    names = list(dict.fromkeys(workloads))
    for name in names:
        if name not in WORKLOADS:
            legal = ", ".join(WORKLOADS)
            raise ConfigError(f"compare: --workload must be one of {legal} (got {name!r})")
    specs = expand(methods)
    rows: list[ScoreRow] = []
    about: dict[str, Any] = {}
    for name in names:
        cases, about[name] = _recorded(model, dtype, text) if name == RECORDED else _made_up(name)
        fits: dict[Any, Calibration] = {}
        rows += [
            _row(name, tokens, spec.label, some, fits)
            for tokens, some in cases.items()
            for spec in specs
        ]
    provenance = {
        "versions": versions(),
        "methods": distributions(spec.name for spec in specs),
        **machine(),
        "workloads": about,
        "command": command,
    }
    seconds = round(time.perf_counter() - clock, 1)
    when = {"started": started.isoformat(timespec="seconds"), "seconds": seconds}
    return ScoreReport(provenance, tuple(rows), when)


def _made_up(name: str) -> tuple[Cases, dict[str, Any]]:
    from kvcompress.compare.score_cases import LAYER, SEEDS, TOKENS, made_up_cases

    cases = {tokens: list(made_up_cases(name, tokens)) for tokens in TOKENS}
    return cases, {"head_dim": LAYER.head_dim, "tokens": list(TOKENS), "seeds": list(SEEDS)}


def _recorded(model: str, dtype: str | None, text: str) -> tuple[Cases, dict[str, Any]]:
    from kvcompress.compare.score_recorded import recorded_cases
    from kvcompress.models import load_model

    scored, fitted_to = load_text(text), load_text(CALIBRATION_TEXT)
    loaded = load_model(model, dtype)
    cases = recorded_cases(loaded, scored, fitted_to)
    about = {
        "model": {
            "name": loaded.name,
            "dtype": loaded.dtype,
            "fingerprint": loaded.fingerprint,
        },
        "text": {"name": scored.name, "sha256": scored.sha256},
        "fitted_to": {"name": fitted_to.name, "sha256": fitted_to.sha256},
        "tokens": list(cases),
    }
    return cases, about


def _row(
    workload: str, tokens: int, words: str, cases: Sequence[Case], fits: dict[Any, Calibration]
) -> ScoreRow:
    try:
        config = method_of(words, defaults=CACHE).config()
        measured = {case.name: _measured(words, case, fits) for case in cases}
    except Exception as error:  # the other rows must go on
        return ScoreRow(workload, tokens, words, error=one_line(error))
    names = next(iter(measured.values()))
    means = {name: statistics.fmean(m[name] for m in measured.values()) for name in names}
    # Of the means: a ratio of its own for each case would weigh the cases by their noise.
    ratio = means["all"] / means["exact_rope"] if means["exact_rope"] else None
    return ScoreRow(workload, tokens, words, config, "", {**means, "ratio": ratio}, measured)


def _measured(words: str, case: Case, fits: dict[Any, Calibration]) -> dict[str, float]:
    """Measure a case; ``fits`` holds what was fitted so far, which forms of rope share."""
    from kvcompress.calibrate.contract import fit_key
    from kvcompress.compare.fitted import fitted
    from kvcompress.compare.score_errors import score_errors

    plain = method_of(words, defaults=CACHE)
    key = (hasattr(plain, "fit") and fit_key(plain), id(case.samples), case.seed)
    if key not in fits:
        fits[key] = fitted(plain, [case.samples], case.seed)
    return score_errors(method_of(words, fits[key], defaults=CACHE), case)
