"""Folders for the logs of clusters, below that for temporary files: one a run, of which the latest NUM_KEPT stay."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from serving_core.errors import SettingsError

PREFIX: Final = "splitserve-logs-"
NUM_KEPT: Final = 5


def log_folder(given: str) -> Path:
    """Return the folder for the logs of a run: the given one, or a new one whose name begins with PREFIX and the time.
    Raises SettingsError where the given one cannot be written to."""
    if not given:
        return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-"))
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=given).close()
    except OSError as error:
        raise SettingsError(f"--log-dir {given} cannot be made, or written to: {error.strerror}") from error
    return Path(given).resolve()  # on Ray, ranks run in other folders


def keep_latest(folder: Path) -> int | None:
    """Keep this folder of a run until the returned descriptor is closed, and remove those beside it but for the latest
    NUM_KEPT and those that other runs still keep. A folder that `log_folder` was given is left alone: None."""
    if not folder.name.startswith(PREFIX):
        return None
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # where a file system knows no locks, nothing is removed either
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for other in _latest_first(folder.parent)[NUM_KEPT:]:
        _remove_unless_kept(other)
    return lock


def _latest_first(root: Path) -> list[Path]:
    """The folders of this user's runs."""
    found: list[tuple[int, Path]] = []
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has gone
            status = folder.lstat()
            if status.st_uid == os.getuid():
                found.append((status.st_mtime_ns, folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _remove_unless_kept(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
