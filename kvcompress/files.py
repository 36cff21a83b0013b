"""What a path that somebody gave names, and whether a file can be written there."""

from __future__ import annotations

import tempfile
from os import PathLike
from pathlib import Path


def user_path(path: str | PathLike[str]) -> Path:
    """The path, ``~`` for the home folder; of a user that does not exist it is a name as any."""
    plain = Path(path)
    try:
        return plain.expanduser()
    except RuntimeError:  # as Python calls it
        return plain


def is_file(path: Path) -> bool:
    """Whether it is a file: no error where that cannot be told, as of a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether it is a folder: no error where that cannot be told."""
    try:
        return path.is_dir()
    except OSError:
        return False


def takes_files(folder: Path) -> bool:
    """Whether a folder takes new files; permissions alone do not tell, least of all a root user."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
