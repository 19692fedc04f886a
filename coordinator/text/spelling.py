"""What the tokens of a model cannot spell. Some vocabularies lack bytes, such as those of control characters, and a
form that asks for them would lead an answer to where no token may come. Pure."""

from collections.abc import Iterable
from typing import Final

_OF_TEXT: Final = frozenset({*range(0xC0), *range(0xC2, 0xF5)})  # bytes that UTF-8 has
_SHORTEST: Final = {1: 0, 2: 0x80, 3: 0x800, 4: 0x10000}  # the first character of so many bytes
_LAST: Final = 0x10FFFF
_LAST_BEFORE_SURROGATES: Final = 0xD7FF  # of the first byte 0xED, behind which UTF-8 has nothing else


def unspelled_bytes(tokens: Iterable[bytes]) -> frozenset[int]:
    """Return the bytes of UTF-8 that none of these tokens has."""
    left = set(_OF_TEXT)
    for token in tokens:
        left.difference_update(token)
        if not left:
            break
    return frozenset(left)


def unspelled_in(text: str, unspelled: frozenset[int]) -> str:
    """Return the first character of a text that has one of these bytes, as U+XXXX; empty without one."""
    spelled = ((char, char.encode(errors="surrogatepass")) for char in text)
    return next((f"U+{ord(char):04X}" for char, in_bytes in spelled if not unspelled.isdisjoint(in_bytes)), "")


def class_of(unspelled: frozenset[int]) -> str:
    """Return the members of a class, in a regular expression, of all characters that begin with one of these bytes."""
    ranges = (_beginning_with(byte) for byte in sorted(unspelled) if byte < 0x80 or byte >= 0xC2)
    return "".join(rf"\u{{{first:x}}}-\u{{{last:x}}}" for first, last in ranges)


def _beginning_with(byte: int) -> tuple[int, int]:
    """The first and the last character whose UTF-8 begins with this byte."""
    num_bytes = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
    if num_bytes == 1:
        return byte, byte
    num_bits = 6 * (num_bytes - 1)
    first = (byte & (0x3F >> (num_bytes - 1))) << num_bits
    last = min(first + (1 << num_bits) - 1, _LAST)
    return max(first, _SHORTEST[num_bytes]), _LAST_BEFORE_SURROGATES if byte == 0xED else last
