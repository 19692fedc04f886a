"""Define the exceptions that SplitServe raises on purpose.

    SplitServeError
    ├── SettingsError     a flag, variable or file that cannot be used; the process does not start
    ├── ModelError        a model folder that is missing, broken or not supported; the process does not start
    ├── RequestError      a request that cannot be served; carries the public reason
    ├── OutOfBlocks       the KV pool has too few free blocks
    └── RankLost          a process of this node is gone or silent; the node ends

Messages name the limit and the value, and never a path, an address or a traceback of the server: clients see the
messages unchanged. (Only the person who starts the process sees SettingsError and ModelError.)
"""

import re
from typing import Final

# An object's address as Python prints it, which would reveal where code lies
ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


class SplitServeError(Exception):
    """Base of all exceptions raised on purpose."""


class SettingsError(SplitServeError):
    """A setting that cannot be used."""


class ModelError(SplitServeError):
    """A model folder that is missing, broken or not supported."""


class RequestError(SplitServeError):
    """A request that cannot be served.

    `reason` is one of serving_core/reasons.py; `metadata` holds further facts for programs, such as the name of the
    invalid field. The message may quote a library: addresses of objects are removed from it.
    """

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        super().__init__(ADDRESS.sub("", message))
        self.reason = reason
        self.metadata = metadata


class OutOfBlocks(SplitServeError):
    """The KV pool has too few free blocks."""


class RankLost(SplitServeError):
    """A process of this node is gone or silent. The node cannot continue without it."""
