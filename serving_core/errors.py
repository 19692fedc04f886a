"""The exceptions that SplitServe raises on purpose.

    SplitServeError
    ├── SettingsError     a flag, variable or file that cannot be used; the process does not start
    ├── ModelError        a model folder that is missing, broken or not supported; the process does not start
    ├── RequestError      a request that cannot be served as asked; carries the public reason
    ├── OutOfBlocks       the KV pool has fewer free blocks than asked for
    └── RankLost          a process of this node is gone or silent; the node ends

Messages name the limit and the value, and never a path, an address or a traceback of the server: they
reach clients as they stand. (SettingsError and ModelError reach only the person who starts the process.)
"""

import re
from typing import Final

ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, where Python shows one: it tells where code lies


class SplitServeError(Exception):
    """Base of all exceptions raised on purpose."""


class SettingsError(SplitServeError):
    """A setting that cannot be used."""


class ModelError(SplitServeError):
    """A model folder that is missing, broken or not supported."""


class RequestError(SplitServeError):
    """A request that cannot be served as asked. `reason` is UPPER_SNAKE, one of the public statuses' reasons;
    `metadata` tells more to programs, such as the name of the field that is wrong. The message may quote a library:
    addresses of objects are left out of it."""

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        super().__init__(ADDRESS.sub("", message))
        self.reason = reason
        self.metadata = metadata


class OutOfBlocks(SplitServeError):
    """The KV pool has fewer free blocks than asked for."""


class RankLost(SplitServeError):
    """A process of this node is gone or silent. The node cannot go on without it."""
