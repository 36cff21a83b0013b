"""``kvcompress serve`` beside mlx-lm's own server, on the embedded model, in one run.

    pip install openai
    python -m benchmarks.serving --out docs/results/serving.json

All servers run at once and take turns, one request or one load at a time. Each reads four
conversations of some 500 tokens, one by one. Then, in each round, one, two and four clients at once
have theirs answered (greedy text of 48 tokens), which the server has kept: so the time is that of
reading caches, of which most is codes. mlx-lm's own server gets what ``kvcompress serve`` has:
OpenBLAS and, where only that is fast, weights in float32.

Medians of the rounds; a ratio is the median of those to the first server in the same round.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

from attrs import Factory, define, frozen

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
import openai  # noqa: E402

from benchmarks.results import deliver  # noqa: E402
from kvcompress.compare.calibrated import lacking, make  # noqa: E402
from kvcompress.compare.provenance import machine, versions  # noqa: E402
from kvcompress.models.embedded import ensure_demo_model  # noqa: E402
from kvcompress.models.load import only_float32_is_fast  # noqa: E402
from kvcompress.text import load_text  # noqa: E402
from tests.model.served import Server, serving  # noqa: E402

METHODS = ("fp16", "affine:bits=4", "turboquant:bits=4", "a2ats", "vecinfer", "commvq:bits=1")
PLAIN = "mlx_lm.server"
CLIENTS = (1, 2, 4)
CHARACTERS = 2500
"""Of a conversation's prompt: some 500 tokens."""


@frozen
class Answer:
    """When it was asked for, when its first word came, when it was over; and its tokens."""

    asked: float
    begun: float
    ended: float
    read: int
    written: int


@define
class Subject:
    """A server, and what was measured of it.

    Attributes:
        name: How it is called in the results.
        server: What answers.
        read: Tokens of the conversations' prompts.
        new: Seconds to the first word of conversations that were not read before.
        kept: The same of one that the server keeps.
        rates: Tokens a second of all clients together, by the number of clients, for each round.
    """

    name: str
    server: Server
    read: list[int] = Factory(list)
    new: list[float] = Factory(list)
    kept: list[float] = Factory(list)
    rates: dict[int, list[float]] = Factory(lambda: {count: [] for count in CLIENTS})


def weights(folder: Path) -> Path:
    """The embedded model as mlx-lm's own server is to load it: in the type that we serve it in."""
    model = ensure_demo_model()
    if not only_float32_is_fast():
        return model
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    half = mx.load(str(model / "model.safetensors"))
    single = {name: weight.astype(mx.float32) for name, weight in half.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), single, metadata={"format": "mlx"})
    return folder


def started(name: str, plain: Path, folder: Path, stack: ExitStack) -> Subject:
    """A server that runs until ``stack`` is left."""
    if name == PLAIN:
        words = [PLAIN, "--model", str(plain)]
    else:
        words = ["kvcompress", "serve", "--method", name]
    folder.mkdir()
    return Subject(name, stack.enter_context(serving(folder, *words)))


def asked(server: Server, prompt: str, count: int, together: Barrier) -> Answer:
    """One answer, as a stream."""
    with openai.OpenAI(base_url=server.url, api_key="none", timeout=600, max_retries=0) as client:
        together.wait()
        start, begun, usage = time.perf_counter(), 0.0, None
        for chunk in client.completions.create(
            model="default_model",
            prompt=prompt,
            max_tokens=count,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            begun = begun or time.perf_counter()
            usage = chunk.usage or usage
        assert usage is not None
        end = time.perf_counter()
    return Answer(start, begun, end, usage.prompt_tokens, usage.completion_tokens)


def at_once(server: Server, prompts: Sequence[str], count: int) -> list[Answer]:
    """The answers to as many clients as there are prompts."""
    together = Barrier(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(asked, server, prompt, count, together) for prompt in prompts]
        return [job.result() for job in jobs]


def rate(answers: Sequence[Answer]) -> float:
    """Tokens a second of all together."""
    seconds = max(a.ended for a in answers) - min(a.asked for a in answers)
    return sum(a.written for a in answers) / seconds


def load(subjects: Sequence[Subject], prompts: Sequence[str], rounds: int, count: int) -> None:
    """Put the load on all servers, in turn."""
    for prompt in prompts:  # the first also makes what is made once; the median is not of it
        for subject in subjects:
            [answer] = at_once(subject.server, [prompt], 1)
            subject.read.append(answer.read)
            subject.new.append(answer.begun - answer.asked)
    for _ in range(rounds):
        for clients in CLIENTS:
            for subject in subjects:
                answers = at_once(subject.server, prompts[:clients], count)
                subject.rates[clients].append(rate(answers))
                if clients == 1:
                    subject.kept.append(answers[0].begun - answers[0].asked)


def row(subject: Subject, plain: Subject) -> dict[str, Any]:
    """What was measured of a server, beside the plain one."""
    memory = subject.server.memory()
    return {
        "server": subject.name,
        "tokens_per_second": medians(subject.rates),
        "ratio": medians(
            {
                clients: [
                    own / other for own, other in zip(rates, plain.rates[clients], strict=True)
                ]
                for clients, rates in subject.rates.items()
            }
        ),
        "first_token_seconds": medians({"new": subject.new, "kept": subject.kept}),
        "conversations": memory.conversations,
        "kept_bytes": memory.counted,
    }


def medians(values: Mapping[Any, Sequence[float]]) -> dict[str, float]:
    return {str(name): statistics.median(each) for name, each in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--method", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    args = parser.parse_args()
    make(lacking(args.method))  # so that every server finds its calibration made
    text = load_text("prose-eval").content
    prompts = [text[place * 9000 :][:CHARACTERS] for place in range(max(CLIENTS))]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        plain = weights(folder / "model")
        subjects = [
            started(name, plain, folder / str(place), stack)
            for place, name in enumerate((PLAIN, *args.method))
        ]
        load(subjects, prompts, args.rounds, args.tokens)
        rows = [row(subject, subjects[0]) for subject in subjects]
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]]),
        "rounds": args.rounds,
        "prompt_tokens": subjects[0].read,
        "answer_tokens": args.tokens,
        "rows": rows,
        "versions": versions(),
        "machine": machine(),
    }
    deliver(result, args.out)


if __name__ == "__main__":
    main()
