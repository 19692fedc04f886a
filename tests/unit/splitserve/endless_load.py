"""A coordinator or a node that never comes to the end of its start.

`python -m tests.unit.splitserve.endless_load coordinator|mixed` takes the arguments of that command, and says on stderr
when it loads.
"""

import sys
import threading


def _load(*_):
    sys.stderr.write("loading\n")
    threading.Event().wait()


if __name__ == "__main__":
    if sys.argv.pop(1) == "coordinator":
        from coordinator import server
        from coordinator.process import main

        server.read_served_model = _load
    else:
        from engine.engine import Engine
        from serving_node.process import node_command

        Engine.warm_up, main = _load, node_command("mixed")
    main()
