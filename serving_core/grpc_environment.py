"""Set what gRPC reads from the environment when it is imported. Whoever starts a process imports this before gRPC.

With gRPC's fork support a process that is started from one with gRPC channels reads from their sockets between fork and
exec: messages of live streams are lost, and many such children die of SIGSEGV.
"""

import os
from typing import Final

GRPC_ENVIRONMENT: Final = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_VERBOSITY": "NONE",  # it tells of each connection that idled away; what matters is in our own logs
}

for _name, _value in GRPC_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
