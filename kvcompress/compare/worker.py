"""One row in a fresh process: ``python -m kvcompress.compare.worker JOB.json ANSWER.json``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvcompress.compare.job import Answer, Job
from kvcompress.compare.methods import config_of, method_of
from kvcompress.compare.report import Row, one_line
from kvcompress.errors import ConfigError

if TYPE_CHECKING:
    from kvcompress.text import RetrievalPrompt


def main(job_path: Path, answer_path: Path) -> None:
    """Measure the row of a job; an error becomes the answer's row."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before anything imports mlx
    job = Job.load(job_path)
    start = time.perf_counter()
    try:
        answer = measure(job)
    except Exception as error:  # the other rows must go on
        answer = Answer(Row(job.method, error=one_line(error)))
    seconds = time.perf_counter() - start
    row = attrs.evolve(answer.row, readings={**answer.row.readings, "seconds": seconds})
    attrs.evolve(answer, row=row).save(answer_path)


def measure(job: Job) -> Answer:
    """Load the model and run the protocol on one method.

    Raises:
        KVCompressError: The method, the model or the text cannot be had, or do not fit together.
    """
    import mlx.core as mx

    from kvcompress.compare.evaluate import Evaluator
    from kvcompress.compare.metrics import METRICS
    from kvcompress.compare.plugins import added_metrics, added_workloads
    from kvcompress.compare.positions import check_positions
    from kvcompress.compare.reference import Playback, Recording
    from kvcompress.compare.turns import Turns, share_of_cores
    from kvcompress.models import load_model
    from kvcompress.models.room import keep_freed_memory
    from kvcompress.text import encode, load_text

    keep_freed_memory()
    method = method_of(job.method, job.calibration)
    text = load_text(job.text)
    loaded = load_model(job.model, job.dtype)
    mx.eval(loaded.model.parameters())  # a cast left lazy would count as the cache's memory
    ids = encode(loaded.tokenizer, text.content)
    windows = job.protocol.take_windows(ids, loaded.tokenizer.encode(""))
    check_positions(
        loaded.model,
        job.protocol.longest,
        f"protocol {job.protocol.name}",
        "give a shorter --context",
    )
    prompt, without_prompt = retrieval_prompt(loaded.tokenizer, job.protocol.retrieval)
    metrics, workloads = added_metrics(), added_workloads()
    evaluator = Evaluator(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        protocol=job.protocol,
        metrics={**METRICS, **metrics},
        workloads=workloads,
        reference=(Recording if job.record else Playback)(Path(job.reference)),
        prompt=prompt,
        turns=Turns(Path(job.turns) if job.jobs > 1 else None),
    )
    with share_of_cores(job.jobs):
        outcome = evaluator.run(lambda: method.make_cache(loaded.model), windows)
    return Answer(
        Row(job.method, config_of(method), measures=outcome.measures, readings=outcome.readings),
        {
            "model": {
                "name": loaded.name,
                "dtype": loaded.dtype,
                "fingerprint": loaded.fingerprint,
                "device": str(mx.default_device()),
            },
            "text": {"name": text.name, "sha256": text.sha256, "tokens": len(ids)},
            "without_retrieval": without_prompt,
            "added": {
                name: {"title": added.title, "help": added.help}
                for group in (metrics, workloads)
                for name, added in group.items()
            },
        },
    )


def retrieval_prompt(tokenizer: Any, tokens: int) -> tuple[RetrievalPrompt | None, str]:
    """Build the retrieval test, or say why it is left out.

    How many tokens the facts take depends on the tokenizer, so that a length that is right for
    one model can be too short for another; the rest of the comparison is worth having without it.
    """
    from kvcompress.text import build_retrieval_prompt

    if not tokens:
        return None, "the protocol leaves it out"
    try:
        return build_retrieval_prompt(tokenizer, tokens), ""
    except ConfigError as error:
        return None, str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
