"""Read a file of API keys: each line is NAME KEY, or a key alone."""

import re
from pathlib import Path
from typing import Final

from serving_core.errors import SettingsError
from serving_core.flags import is_secret

MAX_KEYS: Final = 1024  # each call is compared with all keys
MAX_FILE_BYTES: Final = 2**20
_NAME: Final = re.compile(r"[\w.@-]{1,64}")


def read_api_keys(path: Path) -> dict[str, str]:
    """Read a file of API keys, and return a map of key to holder name.

    Each line is NAME KEY, or KEY alone for an empty name. Blank lines and lines that begin with # are skipped. Raises
    SettingsError, whose text holds no key, for a file that cannot be read, any other line, a repeated key, and no or
    more than MAX_KEYS keys.
    """
    holders: dict[str, str] = {}
    for number, line in enumerate(_text_in(path).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        *names, key = words
        if len(names) > 1 or not is_secret(key) or not all(map(_NAME.fullmatch, names)):
            raise SettingsError(f"line {number} of {path} must be NAME KEY, or a key alone; {_NAME.pattern} is a name")
        if key in holders:
            raise SettingsError(f"line {number} of {path} has a key that another line has")
        holders[key] = "".join(names)
    if not 1 <= len(holders) <= MAX_KEYS:
        raise SettingsError(f"{path} has {len(holders)} API keys, it must have 1 to {MAX_KEYS}")
    return holders


def _text_in(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise SettingsError(f"{path} has more than {MAX_FILE_BYTES} bytes, the most of a file of API keys")
        return content.decode()
    except OSError as error:
        raise SettingsError(f"{path}, the file of API keys, cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}, the file of API keys, is not UTF-8 text") from error
