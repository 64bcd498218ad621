"""All logs in one small file."""

import io
import os
import tarfile
from pathlib import Path

from megatron_pp_ext.files import whole

LARGEST = 16 * 2**20
"""The most bytes of an archive."""

_OVERHEAD = 1024
"""The most bytes that a file adds to its text: a header and the rest of its last block."""


def unpack(archive: Path, folder: Path) -> None:
    """Put the content of an earlier archive into ``folder``, so that the next one has it too."""
    if archive.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def pack(folder: Path, archive: Path) -> None:
    """Write ``archive`` (.tar.gz) with the end of each file in ``folder``, whole or not at all.

    Every file gets an equal share of the bytes that a log which cannot be compressed would leave.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # gzip adds a few bytes to data that it cannot compress, and tar fills up to a record of 10 KiB.
    share = (LARGEST - LARGEST // 256) // max(1, len(files)) - _OVERHEAD
    with whole(archive) as place, tarfile.open(place, "w:gz") as tar:
        for file in files:
            with file.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(0, size - share))
                text = log.read(share)
            entry = tarfile.TarInfo(str(file.relative_to(folder)))
            entry.size, entry.mtime = len(text), int(file.stat().st_mtime)
            tar.addfile(entry, io.BytesIO(text))
