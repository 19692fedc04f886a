"""Digest code and model, so that figures saved by another version are not taken for those of this one."""

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
    """Return a digest, in hex digits, of names and contents of all .py and .so files of these installed packages."""
    digest = hashlib.blake2s(digest_size=DIGEST_BYTES)
    for package in packages:
        for name, path in _found(package):
            digest.update(f"{package}/{name}\0".encode() + hashlib.blake2s(path.read_bytes()).digest())
    return digest.hexdigest()


def files_digest(folder: Path) -> str:
    """Return a digest, in hex digits, of a model's files: names, sizes and change times, and config.json's text."""
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
