"""Which code figures are of: what is saved by one version of it says nothing of another one."""

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

DIGEST_BYTES: Final = 8
SUFFIXES: Final = (".py", ".so")
NODE: Final = ("serving_node", "prefill_node", "decode_node", "kv_transfer", "protos", "serving_core")
DECIDING: Final = ("coordinator", *NODE)
SERVING: Final = ("splitserve", *DECIDING, "engine")  # all that runs when requests are served
SIMULATED: Final = (*DECIDING, "splitserve_bench.simulate")  # all that runs when that is simulated


@cache
def code_digest(packages: tuple[str, ...]) -> str:
    """Of every source and every compiled file in these packages."""
    digest = hashlib.blake2s(digest_size=DIGEST_BYTES)
    for package in packages:
        for folder in map(Path, _found(package)):
            for path in sorted(folder.rglob("*")):
                if path.suffix in SUFFIXES:
                    content = hashlib.blake2s(path.read_bytes()).digest()
                    digest.update(f"{package}/{path.relative_to(folder)}\0".encode() + content)
    return digest.hexdigest()


def _found(package: str) -> list[str]:
    spec = find_spec(package)
    assert spec is not None, f"{package} is a package of ours"
    return list(spec.submodule_search_locations or ())
