"""Create a folder for the sockets of this process and its children, below the folder for temporary files.

The folder of a killed process is removed when the next process creates its own.
"""

import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from serving_core.errors import SettingsError

LONGEST_PATH: Final = 107 if sys.platform == "linux" else 103  # of a socket
PREFIX: Final = "splitserve-sockets-"


def fits(path: Path) -> bool:
    """Return whether a socket can have this path."""
    return len(os.fsencode(path)) <= LONGEST_PATH


class SocketFolder:
    """A private folder, locked while its process lives. It is locked before it gets its name, so that no process takes
    it for an abandoned one. As a context manager, it exists within the context.
    """

    def __init__(self) -> None:
        """Choose the path. Raises SettingsError if no folder for temporary files is writable."""
        try:
            self._root = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise SettingsError(
                f"{error.strerror}: set TMPDIR to one that can be written to, or give a container --tmpfs /tmp"
            ) from error
        self.path: Final = self._root / f"{PREFIX}{secrets.token_hex(4)}"
        self._lock: int | None = None

    def make(self) -> None:
        """Create the folder, and remove abandoned ones."""
        _sweep(self._root)
        nameless = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self._root))
        self._lock = os.open(nameless, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # without locks in the file system, no process takes it for an abandoned one either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nameless.rename(self.path)

    def __enter__(self) -> Self:
        self.make()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder, if it was created and still exists."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is gone
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
