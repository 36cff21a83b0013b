from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import pytest
from mlx_lm import server

from tests.cli.models import call, peak, tiny_is_embedded, tiny_model

__all__ = ["peak", "tiny_is_embedded", "tiny_model"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server would be run with, when it is not."""
    runs: list[Any] = []
    monkeypatch.setattr(server, "run", lambda *words: runs.append(words))
    return runs


def test_unknown_flags_reach_the_server_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: str
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(server, "main", lambda: seen.append(sys.argv))
    before = sys.argv
    flags = ["--port", "81", "--temp=0.5", "--use-default-chat-template", "--top-k", "-1"]
    words = ["--port", "81", "--method", "affine", *flags[2:], "--model", tiny_model]
    assert call(capsys, "serve", *words) == (0, "", "")
    assert seen == [["kvcompress serve", "--model", tiny_model, *flags]]
    assert sys.argv is before


def test_the_server_runs_with_its_flags_and_the_method(
    capsys: pytest.CaptureFixture[str], served: list[Any], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--method", "turboquant:bits=3", "--port", "0", "--top-k", "7")
    assert call(capsys, "serve", *words)[0] == 0
    [(host, port, provider)] = served
    assert (host, port) == ("127.0.0.1", 0)
    assert provider.cli_args.top_k == 7
    provider.load_default()
    assert {cache.method.bits for cache in provider.model.make_cache()} == {3}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--method", "nobody"), "error: no method named 'nobody'"),
        (("--method", "turboquant:bits=9"), "error: turboquant: bits must be"),
        (("--method", "affine:bits=2,4"), "stands for 2 configurations"),
        (("--kv-bits", "4"), "error: serve: --kv-bits quantises mlx-lm's own caches"),
        (("--port", "70000"), "error: serve: cannot serve at 127.0.0.1, port 70000"),
        (("--host", "no.such.host.invalid"), "error: serve: cannot serve at no.such.host.invalid"),
    ],
)
def test_mistakes_are_one_clear_line_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
    served: list[Any],
    tiny_model: str,
    words: tuple[str, ...],
    text: str,
) -> None:
    code, out, err = call(capsys, "serve", "--model", tiny_model, *words)
    assert (code, out, served) == (2, "", [])
    assert text in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_refused(
    capsys: pytest.CaptureFixture[str], served: list[Any], tiny_model: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, _, err = call(capsys, "serve", "--model", tiny_model, "--port", port)
    assert (code, served) == (2, [])
    assert f"port {port} (OSError" in err
    assert "give others with --host and --port" in err


def test_a_flag_that_the_server_does_not_know_is_its_mistake(
    capsys: pytest.CaptureFixture[str], served: list[Any], tiny_model: str
) -> None:
    code, out, err = call(capsys, "serve", "--model", tiny_model, "--no-such", "3")
    assert (code, out, served) == (2, "", [])
    assert "kvcompress serve: error: unrecognized arguments: --no-such 3" in err


def test_a_model_that_cannot_be_served_ends_the_program(
    capsys: pytest.CaptureFixture[str], peak: None, tiny_model: str
) -> None:
    threads = set(threading.enumerate())
    words = ("--model", tiny_model, "--port", "0", "--method", "peak")
    code, out, err = call(capsys, "serve", *words)
    assert (code, out) == (2, "")
    assert "error: peak: needs a calibration and was given none" in err
    assert set(threading.enumerate()) == threads


def test_the_embedded_model_is_calibrated_where_a_method_lacks_it(
    capsys: pytest.CaptureFixture[str],
    served: list[Any],
    tiny_model: str,
    peak: None,
    tiny_is_embedded: None,
) -> None:
    words = ("--model", tiny_model, "--method", "peak:window=1", "--port", "0")
    code, _, err = call(capsys, "serve", *words)
    assert code == 0
    assert "fitting peak bits=8" in err
    [(_, _, provider)] = served
    provider.load_default()
    assert provider.model.make_cache()[0].method.calibration is not None
