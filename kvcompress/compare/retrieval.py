"""Whether a model still finds what it read long ago: recall of facts, copying of a passage."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvcompress.compare.metrics import LogProbs, Measures
from kvcompress.compare.session import Session
from kvcompress.text import RetrievalPrompt

STEP: Final = 64
"""Tokens of a probe read at a time: what it asks for stands far behind them."""


def retrieval(session: Session, prompt: RetrievalPrompt) -> Measures:
    """Read a prompt of facts once, then put every question to a branch of it.

    Args:
        session: A sequence that has read nothing.
        prompt: The prompt and its questions.

    Returns:
        Shares of facts recalled and of tokens copied, and mean log-probabilities of both, which
        do not move in steps.
    """
    session.prefill(prompt.context)
    recalled, answers = [], []
    for fact in prompt.facts:
        hits, log_probs = _ask(session, fact.stem, fact.answer)
        recalled.append(hits.all())
        answers.append(log_probs.sum())
    copied, copies = _ask(session, prompt.copy_cue, prompt.copy_target)
    return {
        "retrieval_tokens": len(prompt.context),
        "retrieval_recall": float(np.mean(recalled)),
        "retrieval_recall_log_prob": float(np.mean(answers)),
        "retrieval_copy": float(copied.mean()),
        "retrieval_copy_log_prob": float(copies.mean()),
    }


def _ask(
    session: Session, cue: tuple[int, ...], target: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Feed a cue and what should follow; whether each target token came first, and its chance."""
    asked = session.branch()
    rows: LogProbs = asked.predictions([*cue, *target[:-1]], len(target), STEP)
    chosen = np.array(target)
    hits = rows.argmax(axis=-1) == chosen
    return hits, rows[np.arange(len(target)), chosen].astype(np.float64)
