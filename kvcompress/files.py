"""Whether a file can be written, found out before there is anything to write."""

from __future__ import annotations

import tempfile
from pathlib import Path


def takes_files(folder: Path) -> bool:
    """Whether a folder takes new files; permissions alone do not tell, least of all a root user."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
