"""Set the environment variables that gRPC reads when it is imported. A process must import this module before gRPC.

With gRPC's fork support, a process started from one with gRPC channels reads from their sockets between fork and exec:
messages of live streams are lost, and many such children die of SIGSEGV.
"""

import os
from typing import Final

GRPC_ENVIRONMENT: Final = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_VERBOSITY": "NONE",  # it logs each idle connection's end; SplitServe's own logs cover failures
}

for _name, _value in GRPC_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
