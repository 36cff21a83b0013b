"""Texts to calibrate on and to measure on: built-in ones, a file or a folder."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.files import is_file, is_folder, user_path
from kvcompress.text.prose import prose_halves

SUFFIXES: Final = (".md", ".py", ".txt")
"""What is read of a folder."""

CODE_CALIBRATION: Final = (
    "argparse",
    "calendar",
    "configparser",
    "dataclasses",
    "difflib",
    "functools",
    "imaplib",
    "inspect",
    "locale",
)
CODE_EVAL: Final = (
    "mailbox",
    "optparse",
    "pdb",
    "pickle",
    "shutil",
    "smtplib",
    "statistics",
    "subprocess",
    "threading",
)


@frozen
class Text:
    """A text and what identifies it in a report.

    Attributes:
        name: The name or path that was asked for.
        content: The text itself.
        sha256: Hex digest of the content in UTF-8. The built-in texts follow Python's version,
            so only the digest says which text was used.
    """

    name: str
    content: str = field(repr=False)
    sha256: str = field(init=False)

    @sha256.default
    def _digest(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


BUILTIN: Final[dict[str, Callable[[], str]]] = {
    "prose-eval": lambda: prose_halves()[0],
    "prose-calibration": lambda: prose_halves()[1],
    "code-eval": lambda: _module_sources(CODE_EVAL),
    "code-calibration": lambda: _module_sources(CODE_CALIBRATION),
}
"""Texts that need no file. Those to measure on share nothing with those to calibrate on."""


def load_text(name_or_path: str | Path) -> Text:
    """Return a built-in text, or what a file or folder holds.

    Args:
        name_or_path: A name in `BUILTIN`, a UTF-8 file, or a folder: all its ``.md``, ``.py`` and
            ``.txt`` files, by path in order, hidden ones left out, with a blank line between.

    Raises:
        ConfigError: It is none of these, is not UTF-8, or holds no text.
    """
    name = str(name_or_path)
    path = user_path(name)
    if name in BUILTIN:
        content = BUILTIN[name]()
    elif name and is_folder(path):  # an empty name would be the folder one stands in
        content = "\n\n".join(_read(file) for file in _files(path))
    elif is_file(path):
        content = _read(path)
    else:
        raise ConfigError(
            f"text: {name!r} is neither a file, nor a folder, nor one of {', '.join(BUILTIN)}"
        )
    if not content.strip():
        wanted = f" ({', '.join(SUFFIXES)} files are read)" if is_folder(path) else ""
        raise ConfigError(f"text: {name!r} holds no text{wanted}")
    return Text(name, content)


def encode(tokenizer: Any, content: str) -> list[int]:
    """Return the token ids of a text of any length, without special tokens or a warning.

    Args:
        tokenizer: A tokenizer as ``mlx_lm.load`` returns it.
        content: The text.
    """
    return list(tokenizer.encode(content, add_special_tokens=False, verbose=False))


def _files(folder: Path) -> list[Path]:
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text: {path} is not UTF-8 ({error.reason} at {error.start})") from error
    except OSError as error:
        raise ConfigError(f"text: {path} cannot be read ({error.strerror})") from error


def _module_sources(modules: Sequence[str]) -> str:
    """The sources of modules of the standard library, one after another."""
    sources = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec else None
        source: str | None = loader.get_source(name) if loader else None
        if source is None:
            raise ConfigError(
                f"text: this Python comes without the source of {name!r}; give a file or a folder"
            )
        sources.append(source)
    return "\n\n".join(sources)
