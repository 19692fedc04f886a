"""Exit code 0 when healthy, for container health checks: `python -m splitserve.healthcheck HOST:PORT [NODE]`.

Without NODE: the coordinator runs. With NODE: the node of that name is attached to it and ready.
The API key comes from SPLITSERVE_API_KEY.
"""

import os
import sys

from splitserve.client import LIVENESS, Client
from splitserve.errors import ClientError

TIMEOUT_S = 5.0


def is_healthy(target: str, node: str | None = None) -> bool:
    """Raises ClientError when the coordinator does not answer."""
    with Client(target, api_key=os.environ.get("SPLITSERVE_API_KEY"), timeout_s=TIMEOUT_S) as client:
        if node is None:
            return client.health(LIVENESS)
        return any(load.name == node and load.state == "ready" for load in client.loads().nodes)


if __name__ == "__main__":
    try:
        sys.exit(0 if is_healthy(*sys.argv[1:]) else "not ready")
    except ClientError as error:
        sys.exit(str(error))
