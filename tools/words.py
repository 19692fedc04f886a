"""Refuse words that the project has given up for the field's: `python -m tools.words`, which `make check` runs.

`words.txt` beside this file has a line for each: a regular expression, the word to use, and the paths where the
expression may stand (globs), with tabs between them.
"""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, NamedTuple

SUFFIXES: Final = frozenset("|.c|.h|.html|.js|.json|.md|.proto|.py|.sh|.toml|.txt|.yaml|.yml".split("|"))  # noqa: SIM905
EXEMPT: Final = ("CHANGELOG.md", "LICENSE", "*_pb2*", "tools/words.txt")


class Word(NamedTuple):
    """One old word."""

    pattern: re.Pattern[str]
    instead: str
    exempt: tuple[str, ...]


def read_words(text: str) -> list[Word]:
    """Return the words of a list's lines; lines that begin with # are comments."""
    words = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pattern, instead, *exempt = line.split("\t")
            words.append(Word(re.compile(pattern), instead, tuple(exempt)))
    return words


def find_words(path: str, text: str, words: list[Word]) -> list[str]:
    """Return a sentence for each old word in a file's path or text."""
    found = []
    for word in words:
        if any(fnmatch(path, glob) for glob in (*EXEMPT, *word.exempt)):
            continue
        for number, line in enumerate((path, *text.splitlines())):
            if match := word.pattern.search(line):
                found.append(f"{path}:{number}: {match[0]!r} is called {word.instead} here")
    return found


def main() -> int:
    """Check all tracked files, print what is found, and return the exit code."""
    words = read_words(Path(__file__).with_name("words.txt").read_text())
    found: list[str] = []
    for path in subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines():
        if Path(path).suffix in SUFFIXES and Path(path).is_file():
            found += find_words(path, Path(path).read_text(errors="ignore"), words)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
