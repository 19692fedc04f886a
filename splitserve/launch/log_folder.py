"""Create the log folders of clusters below the folder for temporary files: one for each run, the latest NUM_KEPT
kept."""

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
    """Return the folder for the logs of a run, and create it: `given`, or a new one named PREFIX and the time.

    Raises SettingsError when the given folder is not writable.
    """
    if not given:
        return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-"))
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=given).close()
    except OSError as error:
        raise SettingsError(f"--log-dir {given} cannot be made, or written to: {error.strerror}") from error
    return Path(given).resolve()  # on Ray, ranks run in other folders


def keep_latest(folder: Path) -> int | None:
    """Keep this folder until the returned file descriptor is closed, and remove older folders of runs.

    The latest NUM_KEPT folders and those that other runs keep are not removed. Returns None, and removes nothing, for a
    folder that was given to `log_folder`.
    """
    if not folder.name.startswith(PREFIX):
        return None
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # without file locks nothing is removed either
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for other in _latest_first(folder.parent)[NUM_KEPT:]:
        _remove_unless_kept(other)
    return lock


def _latest_first(root: Path) -> list[Path]:
    """Return the log folders of this user, latest first."""
    found: list[tuple[int, Path]] = []
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed meanwhile
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
