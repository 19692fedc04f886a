"""A folder for the sockets of this process and its children, below that for temporary files. What a process leaves that
was killed goes when the next one makes its own."""

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

LONGEST_PATH: Final = 107 if sys.platform == "linux" else 103  # that a socket may have
PREFIX: Final = "splitserve-sockets-"


def fits(path: Path) -> bool:
    """Whether a socket can have this path."""
    return len(os.fsencode(path)) <= LONGEST_PATH


class SocketFolder:
    """Nobody else's, and locked while its process lives. It has its lock before its name, so that nobody takes it for
    one that was left. As a context it is there from the beginning to the end."""

    def __init__(self) -> None:
        """Says where it will be. Raises SettingsError where no folder for temporary files can be written to."""
        try:
            self._root = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise SettingsError(
                f"{error.strerror}: set TMPDIR to one that can be written to, or give a container --tmpfs /tmp"
            ) from error
        self.path: Final = self._root / f"{PREFIX}{secrets.token_hex(4)}"
        self._lock: int | None = None

    def make(self) -> None:
        """Makes it, and removes those that were left."""
        _sweep(self._root)
        nameless = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self._root))
        self._lock = os.open(nameless, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # where a file system knows no locks, nobody takes it for one that was left either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nameless.rename(self.path)

    def __enter__(self) -> Self:
        self.make()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes it, if it was made and nobody who cleans up has done so."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or has gone
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
