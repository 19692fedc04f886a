"""Name LoRA adapters on the command line, in requests and in fingerprints. Torch-free."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from serving_core.errors import SettingsError

MOST_ADAPTERS: Final = 64
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_KEY_PREFIX: Final = "lora:"


def parse_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each adapter name, from the values NAME=FOLDER of --lora.

    Raises SettingsError for a malformed value, a repeated name, or more than MOST_ADAPTERS.
    """
    folders: dict[str, Path] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not folder or not ADAPTER_NAME.fullmatch(name):
            wanted = f"NAME=FOLDER with a name that matches {ADAPTER_NAME.pattern}"
            raise SettingsError(f"--lora must be {wanted}, not {text!r:.200}")
        if name in folders:
            raise SettingsError(f"--lora names {name} twice")
        folders[name] = Path(folder)
    if len(folders) > MOST_ADAPTERS:
        raise SettingsError(f"--lora is given {len(folders)} times, the limit is {MOST_ADAPTERS}")
    return folders


def adapter_key(name: str) -> str:
    """Return the key of an adapter's content digest in its node's fingerprint."""
    return _KEY_PREFIX + name


def without_adapters(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a fingerprint that are not of adapters."""
    return {key: value for key, value in fingerprint.items() if not key.startswith(_KEY_PREFIX)}


def adapters_in(fingerprint: Iterable[str]) -> list[str]:
    """Return the names of the adapters among the keys of a fingerprint, sorted."""
    return sorted(key.removeprefix(_KEY_PREFIX) for key in fingerprint if key.startswith(_KEY_PREFIX))
