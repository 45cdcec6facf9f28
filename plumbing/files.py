"""Files that are there whole, or as they were before: written aside, synced, renamed."""

import os
from pathlib import Path


class WriteError(RuntimeError):
    """What a run cannot do without could not be written; what was there is as it was."""


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in the place of the one that may be there. Raises OSError, and leaves nothing."""
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_bytes(data)
        sync(aside)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
