"""The inputs of each decoder: those that are kept, a file of lines in base64, and those that it accepts now."""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.fuzz.seeds import SEEDS

FOLDER: Final = Path(__file__).parent / "corpus"
MAX_INPUT_BYTES: Final = 2048
MAX_INPUTS: Final = 100  # of one decoder


def inputs_of(name: str) -> list[bytes]:
    return [*SEEDS.get(name, list)(), *read_corpus(name)]


def read_corpus(name: str) -> list[bytes]:
    return [base64.b64decode(line) for line in (FOLDER / f"{name}.txt").read_text().split()]


def add_to_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Adds the shortest of these, as far as there is room."""
    kept = read_corpus(name)
    new = sorted(set(inputs) - {b"", *kept}, key=lambda each: (len(each), each))
    lines = [base64.b64encode(each).decode() for each in (kept + new)[:MAX_INPUTS]]
    (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
