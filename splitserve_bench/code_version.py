"""Which code, and which model, figures are of: what is saved by one version says nothing of another one."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

DIGEST_BYTES: Final = 8
SUFFIXES: Final = (".py", ".so")
NODE: Final = ("serving_node", "prefill_node", "decode_node", "kv_transfer", "protos", "serving_core")
SERVING: Final = ("splitserve", "coordinator", *NODE, "engine")  # all that runs when requests are served


@cache
def code_digest(packages: tuple[str, ...]) -> str:
    """Return a digest of every source and every compiled file in these packages."""
    digest = hashlib.blake2s(digest_size=DIGEST_BYTES)
    for package in packages:
        for name, path in _found(package):
            digest.update(f"{package}/{name}\0".encode() + hashlib.blake2s(path.read_bytes()).digest())
    return digest.hexdigest()


def files_digest(folder: Path) -> str:
    """Return a digest of a model's files: their names, sizes and times, and the content of config.json."""
    digest = hashlib.blake2s((folder / "config.json").read_bytes(), digest_size=DIGEST_BYTES)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found = path.stat()
        digest.update(f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _found(package: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(package)
    assert spec is not None, f"{package} is one of ours"
    assert spec.submodule_search_locations is not None, f"{package} is a package"
    for folder in map(Path, spec.submodule_search_locations):
        files = sorted(folder.rglob("*"))
        yield from ((str(path.relative_to(folder)), path) for path in files if path.suffix in SUFFIXES)
