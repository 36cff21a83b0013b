"""Small made-up reports."""

from __future__ import annotations

import attrs

from kvcompress.compare.protocol import QUICK
from kvcompress.compare.report import Report, Row
from kvcompress.compare.score_report import ScoreReport, ScoreRow


def measured(method: str, bits: float, kl: float) -> Row:
    return Row(
        method,
        {"bits": bits},
        measures={
            "bits_per_value": bits,
            "kl": kl,
            "kl_se": kl / 10 or None,
            "nll_change": kl - 0.01,
            "top1": 0.95,
            "resident_bytes": 1_500_000,
            "times_smaller": 16 / bits,
            "tokens": 1535,
            "peak_bytes": 20_000_000,
            "surprise": 0.25,
            "retrieval_tokens": 1024,
            "retrieval_recall": 0.75,
            "retrieval_copy": 0.91,
        },
        readings={"decode_tokens_per_second": 9.5},
    )


def sample_report() -> Report:
    return Report(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "text": {"name": "prose-eval", "sha256": "0"},
            "protocol": attrs.asdict(QUICK),
            "without_retrieval": "",
        },
        (
            measured("fp16", 32, 0.0),
            measured("affine:bits=4", 6.5, 0.006),
            measured("affine:bits=2", 5.0, 0.26),
            measured("toys:turboquant:bits=2", 4.0, 0.04),
            Row("toy|x", error="CalibrationRequired: toy: make one"),
        ),
        {"surprise": {"title": "surprise", "help": "how surprised it is"}},
        {"started": "2030-01-01T00:00:00+00:00", "seconds": 60.0},
    )


def sample_scores() -> ScoreReport:
    """A small made-up comparison of scores."""

    def row(workload: str, tokens: int, method: str, factor: float) -> ScoreRow:
        measures = {
            "all": 0.0125 * factor,
            "recent": 0.0,
            "older": 0.02 * factor,
            "exact_rope": 0.0125,
            "key_error": 0.03,
            "coded": 176.0,
            "ratio": factor,
            "age 16": 0.5 * factor,
            "age 32": 2.0 * factor,
            "age 64": 0.0,
        }
        return ScoreRow(workload, tokens, method, {"b": 2048}, "", measures, {"seed 0": measures})

    about = {"text": {"name": "prose-eval"}, "fitted_to": {"name": "prose-calibration"}}
    about["model"] = {"name": "tiny", "dtype": "float32"}
    return ScoreReport(
        {"workloads": {"local_recency": {"seeds": [0, 1]}, "recorded": about}},
        (
            row("local_recency", 200, "a2ats:rope=exact", 1.0),
            row("local_recency", 200, "a2ats:rope=single", 8.125),
            ScoreRow("local_recency", 200, "toy|x", error="ConfigError: toy: no"),
            ScoreRow("local_recency", 400, "toy|x", error="ConfigError: toy: no"),
            row("recorded", 400, "a2ats:rope=exact", 1.0),
        ),
        {"started": "2030-01-01T00:00:00+00:00", "seconds": 3.0},
    )
