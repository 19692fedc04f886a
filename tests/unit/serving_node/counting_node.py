"""A node process that prints how many threads its engine computes with, once the engine has computed, and ends.

`python -m tests.unit.serving_node.counting_node` takes the arguments of `python -m serving_node`.
"""

import sys

import torch

from engine.engine import Engine


def _counting(warm_up):
    def counting(self):
        warm_up(self)
        sys.stdout.write(f"{torch.get_num_threads()}\n")
        sys.exit(0)

    return counting


if __name__ == "__main__":
    from serving_node.process import node_command

    Engine.warm_up = _counting(Engine.warm_up)
    node_command("mixed")()
