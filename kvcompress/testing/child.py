"""Runs part of a suite in a fresh process: ``python -m kvcompress.testing.child JOB.json``.

A heap that a kernel corrupts, and whatever depends on the hash seed or on what was imported
before, show in another process alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    import numpy as np

    from kvcompress.layers import LayerSpec
    from kvcompress.testing.data import Tokens
    from kvcompress.testing.subject import Subject


@frozen(eq=False)
class Outcome:
    """What became of one head size.

    Attributes:
        refused: The text of the error that refused it, or empty.
        keys: What keys decoded to.
        values: What values decoded to.
    """

    refused: str = ""
    keys: np.ndarray[Any, Any] | None = None
    values: np.ndarray[Any, Any] | None = None


@frozen(eq=False)
class Survey:
    """What became of all head sizes in another process.

    Attributes:
        outcomes: By head size.
        died_at: The head size at which the process ended, or 0.
        words: What it said last.
    """

    outcomes: dict[int, Outcome]
    died_at: int = 0
    words: str = ""


def survey(subject: Subject, head_dims: tuple[int, ...]) -> Survey:
    """Try head sizes in a process of its own, under another hash seed."""
    import numpy as np

    cls = type(subject)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "module": cls.__module__,
            "file": inspect.getfile(cls),
            "suite": cls.__qualname__,
            "head_dims": head_dims,
            "folder": folder,
        }
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        run = subprocess.run(
            [sys.executable, "-m", "kvcompress.testing.child", str(path)],
            env={**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        outcomes: dict[int, Outcome] = {}
        for dim in head_dims:
            done = Path(folder) / f"{dim}.npz"
            if not done.is_file():
                words = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
                return Survey(outcomes, dim, words)
            with np.load(done) as file:
                outcomes[dim] = Outcome(str(file["refused"]), file["keys"], file["values"])
        return Survey(outcomes)


def main(path: Path) -> None:
    """Do a job: one file a head size, written when it is done."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before anything imports mlx
    job = json.loads(path.read_text())
    suite: type[Subject] = reduce(getattr, job["suite"].split("."), _module(job))
    import numpy as np

    for dim in job["head_dims"]:
        outcome = try_head_dim(suite(), dim)
        none = np.zeros(0)
        part = Path(job["folder"]) / f"{dim}.part.npz"
        np.savez(
            part,
            refused=outcome.refused,
            keys=none if outcome.keys is None else outcome.keys,
            values=none if outcome.values is None else outcome.values,
        )
        part.rename(part.with_name(f"{dim}.npz"))


def _module(job: dict[str, Any]) -> Any:
    """The module of the suite, from the import path or, where it is not on it, from its file."""
    try:
        return importlib.import_module(job["module"])
    except ImportError:
        spec = importlib.util.spec_from_file_location(job["module"], job["file"])
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[job["module"]] = module
        spec.loader.exec_module(module)
        return module


def survey_tokens(subject: Subject, dim: int) -> tuple[LayerSpec, Tokens]:
    """A layer with this head size, and a few of its tokens."""
    from attrs import evolve

    from kvcompress.layers import Rotary
    from kvcompress.testing.data import tokens

    rotary = Rotary(dim - dim % 2, base=1e4)
    layer = evolve(subject.standard_layer, head_dim=dim, value_dim=dim, rotary=rotary)
    return layer, tokens(layer, 16)


def try_head_dim(subject: Subject, dim: int) -> Outcome:
    """Code a few tokens of a layer with this head size."""
    from kvcompress.errors import ConfigError
    from kvcompress.testing.law import numbers

    layer, came = survey_tokens(subject, dim)
    try:
        codec = subject.build().bind(layer)
    except ConfigError as error:
        return Outcome(refused=str(error))
    codes = codec.encode(came.keys, came.values, came.positions)
    keys, values = codec.decode(codes, came.positions)
    return Outcome(keys=numbers(keys), values=numbers(values))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
