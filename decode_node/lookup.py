"""Candidates for the next tokens of one text, out of the text itself: what followed where it last went as it goes now.
Pure.

The last tokens are looked for among those before them by chains of places with one hash, as LZ77 compressors do it. Of
the places found the one with the longest match is taken, of equals the latest. Where what follows it reaches the end of
the text, it goes on with itself: a text that repeats is continued.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

SHORTEST: Final = 3  # tokens that match; fewer tell little
LONGEST: Final = 32  # a longer match tells no more
MOST_TRIED: Final = 6  # places
NUM_CHAINS: Final = 2**14  # 64 KiB for a text; every token of it takes 4 bytes more
NOWHERE: Final = -1
_FACTORS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class Lookup:
    """Knows one text, which only grows."""

    def __init__(self) -> None:
        self._last = array("i", (NOWHERE,)) * NUM_CHAINS  # place of each chain
        self._before: array[int] = array("i")  # of each place, the one before it in its chain

    def take_in(self, token_ids: Sequence[int], most_tokens: int) -> bool:
        """Takes in so many tokens more of the text, if there are so many; tells whether it knows all of it. Takes less
        than a microsecond a token."""
        last, before = self._last, self._before
        first, second, third = _FACTORS
        for end in range(len(before), min(len(token_ids), len(before) + most_tokens)):
            if end < SHORTEST - 1:
                before.append(NOWHERE)
                continue
            mixed = token_ids[end] * first + token_ids[end - 1] * second + token_ids[end - 2] * third
            chain = (mixed >> 16) % NUM_CHAINS
            before.append(last[chain])
            last[chain] = end
        return len(before) == len(token_ids)

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The place that the end of this text, all of which it knows, matches best, and how many tokens match; (-1, 0)
        where no place does."""
        found, longest = NOWHERE, SHORTEST - 1
        for place, length in self.places(token_ids):
            if length > longest:
                found, longest = place, length
            if longest == LONGEST:
                break
        return (found, longest) if found != NOWHERE else (NOWHERE, 0)

    def places(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Places that the end of this text, all of which it knows, may match, the latest first, and how many tokens
        do."""
        end = len(token_ids) - 1
        place = self._before[end] if end >= 0 else NOWHERE
        for _ in range(MOST_TRIED):
            if place == NOWHERE:
                return
            yield place, _matching(token_ids, place, end)
            place = self._before[place]


def following(token_ids: Sequence[int], place: int, num_tokens: int) -> list[int]:
    """What would come behind the text if it went on as it did behind this place."""
    period = len(token_ids) - 1 - place
    return [token_ids[place + 1 + index % period] for index in range(num_tokens)]


def _matching(token_ids: Sequence[int], place: int, end: int) -> int:
    """How many tokens up to the two places are the same, up to LONGEST."""
    most = min(LONGEST, place + 1)
    for length in range(most):
        if token_ids[place - length] != token_ids[end - length]:
            return length
    return most
