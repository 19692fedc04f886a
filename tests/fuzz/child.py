"""One search of atheris, in a process that it ends: `python -m tests.fuzz.child NAME FOLDER... FLAGS...`."""

import sys

import atheris

PACKAGES = ["coordinator", "kv_transfer", "protos", "serving_core", "serving_node", "splitserve", "splitserve_bench"]

if __name__ == "__main__":
    _, name, *arguments = sys.argv
    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.decoders import DECODERS
    atheris.Setup([name, *arguments], DECODERS[name])
    atheris.Fuzz()
