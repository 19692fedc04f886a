"""Found by Python processes that a test starts: they have the simulated devices too, as soon as they import torch."""

import sys
from importlib.machinery import PathFinder


class Simulating:
    """Finds torch as everybody does, and simulates when it is there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_simulate(module):
            execute(module)
            from tests.simulated_cuda.simulate import simulate

            simulate()

        spec.loader.exec_module = execute_and_simulate
        return spec


sys.meta_path.insert(0, Simulating)
