"""A node process whose engine never ends a step of a prompt that begins with token HANGS.

`python -m tests.unit.serving_node.hanging_node` takes the arguments of `python -m serving_node`.
"""

import threading

from engine.engine import Engine

HANGS = 255


def _hang_or(step):
    def hanging(self, works, on_layer=None):
        if any(work.request.token_ids[0] == HANGS for work in works):
            threading.Event().wait()
        return step(self, works, on_layer)

    return hanging


if __name__ == "__main__":
    from serving_node.process import node_command

    Engine.step = _hang_or(Engine.step)
    node_command("mixed")()
