"""Every other method bears the load that ``test_server.py`` puts on one, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcompress import list_methods
from kvcompress.calibrate import Calibration
from kvcompress.text import load_text
from tests.model.clients import (
    KEPT,
    TOKEN_BYTES,
    ask,
    at_once,
    client_of,
    drop,
    forget,
    streamed,
    talk,
    talks,
    text_of,
)
from tests.model.conftest import CALIBRATED
from tests.model.served import Server, serving

pytest.importorskip("openai")

pytestmark = pytest.mark.model

METHODS = ("fp16", "affine:bits=4", *CALIBRATED)
SINKS, WINDOW, BLOCK = 4, 16, 16  # so few that short conversations have codes too
COUNT = 12
PROSE = load_text("prose-eval").content
QUESTIONS = [f"{PROSE[start : start + 300]}\n\nGo on." for start in (4000, 8000)]


def test_every_method_bears_the_load() -> None:
    own = {row.name for row in list_methods() if row.distribution == "kvcompress"}
    assert own == {words.split(":")[0] for words in METHODS} | {"turboquant"}


@pytest.fixture(scope="module")
def tables(calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tables") / "calibration.safetensors"
    calibration.save(path)
    return path


@pytest.mark.parametrize("method", METHODS)
def test_a_method_bears_the_load(method: str, tables: Path, tmp_path: Path) -> None:
    words = ["kvcompress", "serve", "--method", f"{method}:window={WINDOW}:block={BLOCK}"]
    words += ["--prompt-cache-size", str(KEPT)]
    words += ["--calibration", str(tables)] if method in CALIBRATED else []
    with serving(tmp_path, *words) as server, client_of(server) as client:
        talk(client, 0)  # from here on the template's own words are found, and coded
        together = at_once(server, QUESTIONS, COUNT)
        assert all(len(answer.pieces) > 5 for answer in together)
        a_long_prefix_is_read_once(client)
        nothing_stays_of_what_is_over(server, client)
        alone = [text_of(ask(client, question, count=COUNT)) for question in QUESTIONS]
        assert [answer.text for answer in together] == alone  # read anew


def a_long_prefix_is_read_once(client: Any) -> None:
    first, again = (
        streamed(client, "What is this text about?", PROSE[:1640], COUNT) for _ in range(2)
    )
    read = first.usage.prompt_tokens
    assert read > 300
    # No block grows old during the answer; else the second would find it coded from the start.
    assert (read - SINKS - WINDOW) % BLOCK + COUNT < BLOCK
    assert again.usage.prompt_tokens_details.cached_tokens == read - 1
    assert again.first_s < first.first_s / 3
    assert again.text == first.text


def nothing_stays_of_what_is_over(server: Server, client: Any) -> None:
    """Streams are dropped and short conversations held; mlx-lm counts what is really kept."""
    tokens = forget(client)
    before = server.memory()
    for _ in range(3):
        drop(client)
    talks(client, range(100, 130))
    forget(client)
    after = server.memory()
    one = min(tokens) * TOKEN_BYTES  # more than half of them are exact
    assert abs(after.active - before.active) < one / 2
    assert abs(after.beside - before.beside) < TOKEN_BYTES
    assert after.conversations == KEPT
    assert after.counted == after.held == after.walked
    talk(client, 1)
    [*_, told] = (line for line in server.log.read_text().splitlines() if "Prompt Cache:" in line)
    assert told.endswith(f": {KEPT} sequences, {after.counted / 1e9:.2f} GB")
