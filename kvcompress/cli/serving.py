"""mlx-lm's server with compressed caches: its own code, and two of its classes extended."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache

from kvcompress.cache import attach
from kvcompress.compare.report import one_line
from kvcompress.errors import ConfigError, KVCompressError, UnsupportedModel
from kvcompress.method import CompressionMethod
from kvcompress.models.embedded import NAME as EMBEDDED
from kvcompress.models.embedded import ensure_demo_model
from kvcompress.models.load import cast_parameters, only_float32_is_fast
from kvcompress.models.room import keep_freed_memory


def run_server(method: CompressionMethod, words: Sequence[str]) -> None:
    """Run ``mlx_lm.server`` until it is interrupted; every model it loads has ``method`` attached.

    Args:
        method: A configured method.
        words: What ``mlx_lm.server`` is to read as its command line.

    Raises:
        KVCompressError: A flag does not go with compressed caches, the address cannot be served
            at, or the model cannot be loaded or have the method attached.
        SystemExit: With status 2, where ``mlx_lm.server`` does not understand ``words``.
    """
    keep_freed_memory()

    def provider(args: Namespace) -> AttachingProvider:
        return AttachingProvider(args, method)

    with (
        _in_place_of(server, "ModelProvider", provider),
        _in_place_of(server, "ResponseGenerator", WaitingGenerator),
        _in_place_of(sys, "argv", ["kvcompress serve", *words]),
    ):
        server.main()


@contextlib.contextmanager
def _in_place_of(owner: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class AttachingProvider(server.ModelProvider):  # type: ignore[misc]
    """The server's models, each with the method attached; a model that cannot is refused.

    A draft model keeps its own caches: they are small, and a calibration would not fit it.

    Args:
        args: The server's flags.
        method: A configured method.

    Raises:
        KVCompressError: As :func:`run_server`, but for the model.
    """

    def __init__(self, args: Namespace, method: CompressionMethod) -> None:
        _check_flags(args)
        named = args.model
        for role in ("model", "draft_model"):
            if getattr(args, role) == EMBEDDED:
                setattr(args, role, str(ensure_demo_model().resolve()))
        super().__init__(args)
        if self.is_distributed:
            raise ConfigError("serve: cannot serve from several processes; start one alone")
        if named == EMBEDDED:  # requests may name it so; mlx-lm knows its folder only
            for known in (self._model_map, self._adapter_map):
                known[EMBEDDED] = known["default_model"]
        with contextlib.suppress(OSError):  # without it the server cannot list its models
            Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
        self._method = method
        self._failure: KVCompressError | None = None
        self._tried = threading.Event()

    def load_default(self) -> None:
        """Load the model of the command line; a failure is kept for :meth:`wait`."""
        try:
            super().load_default()
        except KVCompressError as error:
            self._failure = error
        finally:
            self._tried.set()

    def wait(self) -> None:
        """Wait for :meth:`load_default` in another thread.

        Raises:
            KVCompressError: Why it failed.
        """
        self._tried.wait()
        if self._failure is not None:
            raise self._failure

    def _load(
        self,
        model_path: str,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        try:
            super()._load(model_path, adapter_path, draft_model_path)
            _make_fast(self.model)
            if self.draft_model is not None:
                _make_fast(self.draft_model)
            attach(self.model, self._method)
        except KVCompressError:
            self.reset()  # or the next request for it would get plain caches
            raise
        except Exception as error:  # whatever mlx-lm, transformers and the hub may raise
            self.reset()
            raise UnsupportedModel(
                f"model {model_path!r}: mlx-lm could not load it ({one_line(error)})"
            ) from error
        caches = make_prompt_cache(self.model)
        self.is_batchable = self.draft_model is None and all(hasattr(c, "merge") for c in caches)


class WaitingGenerator(server.ResponseGenerator):  # type: ignore[misc]
    """Generates the server's answers; made once its model is loaded, so a mistake ends the start.

    Beside a draft model no conversation is kept for the next one.

    Args:
        provider: The models.
        prompt_cache: The conversations that are kept.

    Raises:
        KVCompressError: As :meth:`AttachingProvider.wait`.
    """

    def __init__(self, provider: AttachingProvider, prompt_cache: Any) -> None:
        super().__init__(provider, prompt_cache)
        try:
            provider.wait()
        except BaseException:  # Ctrl-C too: its thread would keep the process alive
            self.stop_and_join()
            raise

    def _serve_single(self, request: tuple[Any, ...], stream: Any) -> None:
        super()._serve_single(request, stream)
        if self.model_provider.draft_model is not None:
            # mlx-lm counts more tokens of a drafted conversation than its caches hold, so what
            # another request took over would stand at wrong positions.
            self.prompt_cache.trim_to(n_sequences=0)


def _check_flags(args: Namespace) -> None:
    if args.kv_bits is not None:
        raise ConfigError(
            "serve: --kv-bits quantises mlx-lm's own caches, which --method replaces; "
            f"leave it out, or choose --method affine:bits={args.kv_bits}"
        )
    try:
        [(family, _, _, _, (host, *_)), *_] = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.create_server((host, args.port), family=family):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"serve: cannot serve at {args.host}, port {args.port} ({one_line(error)}); "
            f"give others with --host and --port"
        ) from error


def _make_fast(model: Any) -> None:
    """Cast to float32 where only that has fast products; see ``kvcompress.models.load_model``."""
    if only_float32_is_fast():
        cast_parameters(model, mx.float32)
        mx.eval(model.parameters())
