"""Run a process of SplitServe as if it had another version.

python -m tests.system.other_version VERSION MODULE ARGS
"""

import runpy
import sys

from serving_core import version

if __name__ == "__main__":
    _, version.VERSION, module, *arguments = sys.argv  # type: ignore[misc]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
