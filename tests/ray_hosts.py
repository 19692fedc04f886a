"""A Ray cluster of several logical hosts on this machine: `python -m tests.ray_hosts NUM_HOSTS CPUS_OF_EACH`.

Its first line is JSON: the address, and the process id of each host's raylet, under which all that Ray starts there
runs. A process id on stdin removes that host at once; the end of stdin ends the cluster. The first host, that of the
driver, has no CPUs and is not among them.
"""

import json
import sys

from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 80 * 2**20}  # about the least that Ray takes; nothing of ours goes through it


def main(num_hosts: int, num_cpus: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE})
    try:
        added = [cluster.add_node(num_cpus=num_cpus, **STORE) for _ in range(num_hosts)]
        hosts = {_raylet(host): host for host in added}
        sys.stdout.write(json.dumps({"address": cluster.address, "raylets": list(hosts)}) + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            cluster.remove_node(hosts[int(line)], allow_graceful=False)
    finally:
        cluster.shutdown()


def _raylet(host) -> int:
    [raylet] = host.all_processes[PROCESS_TYPE_RAYLET]
    return raylet.process.pid


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
