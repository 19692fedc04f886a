"""Decode the tokens of an output to text incrementally.

The pieces that `add` and `flush` return add up to the tokenizer's decoding of all tokens, and no piece ends within a
character. How much text must be held back depends on the tokenizer's decoder:

- byte-level (GPT-2, Llama 3, Qwen): a token is bytes, so only an incomplete UTF-8 character is held back;
- all others (SentencePiece, WordPiece): the text of a token depends on the previous token, so a window of two is
  decoded. A run of byte tokens (<0xF0>) is held back until it ends: one invalid byte turns the whole run into U+FFFD.
  `ahead` is the text of a valid run so far, for stop strings and token offsets.
"""

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

from serving_core.errors import ModelError

_WINDOWED: Final = {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_SPACE_STAND_IN: Final = "\u2581"  # SentencePiece's space
INVALID: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """Turn the tokens of one output into its text, piece by piece."""

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that is certain now; often empty."""

    @property
    def ahead(self) -> str:
        """Return the characters that `flush` would return, without an incomplete one.

        Further tokens may change them.
        """

    def num_chars_before(self, token_id: int) -> int:
        """Return how many of the characters held back would precede the text of this token if it were added next."""

    def flush(self) -> str:
        """Return the text held back, when the tokens have ended."""


class DetokenizerFactory:
    """Create detokenizers for one tokenizer. Raises ModelError when its decoder is not supported."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = _decoder_kinds(tokenizer)
        self._is_byte_level = kinds == ["ByteLevel"]
        if not self._is_byte_level and not _WINDOWED.issuperset(kinds):
            raise ModelError(f"the tokenizer's decoder ({', '.join(kinds)}) is not supported")
        self._token_bytes: dict[int, bytes] = {}
        self._byte_tokens = _byte_tokens(tokenizer) if "ByteFallback" in kinds else {}

    def keep(self, texts: Collection[str]) -> None:
        """Keep the special tokens with these texts in the output of all detokenizers created afterwards."""
        self._special -= {self._tokenizer.token_to_id(text) for text in texts}

    def __call__(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for one output.

        `after` are the tokens of a text that the output continues: decoders that drop the blank before a text's first
        word then keep it.
        """
        skipped = self._special if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self._tokenizer, skipped, self._token_bytes)
        known = (each for each in reversed(after) if each not in skipped and self._tokenizer.id_to_token(each))
        last = next(known, None)
        context = [] if last is None or last in self._byte_tokens else [last]
        return WindowDetokenizer(self._tokenizer, skipped, self._byte_tokens, context)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token contributes within a text; empty for an unknown id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _bytes_of(token)
        if token_id in self._byte_tokens:
            return self._byte_tokens[token_id]
        if _SPACE_STAND_IN in token:  # decoded alone, the token would lose its leading space
            return token.replace(_SPACE_STAND_IN, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class ByteDetokenizer:
    """Detokenizer for byte-level decoders.

    `token_bytes` is a cache that may be shared; it grows up to the vocabulary's size.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], token_bytes: dict[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    @property
    def ahead(self) -> str:
        return ""

    def num_chars_before(self, token_id: int) -> int:
        held, _ = self._decoder.getstate()
        try:
            codecs.utf_8_decode(held + self._bytes_of(token_id)[:1], "strict", False)
        except UnicodeDecodeError:  # the incomplete character is not continued and becomes U+FFFD
            return 1 if held else 0
        return 0

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        if token_id in self._skipped:
            return b""
        token_bytes = self._token_bytes.get(token_id)
        if token_bytes is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""
            token_bytes = self._token_bytes[token_id] = _bytes_of(token)
        return token_bytes

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for decoders that depend on a token's neighbors.

    `byte_tokens` are the tokens that ByteFallback joins; `context` is the token before the first one, if any.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], byte_tokens: Mapping[int, bytes], context: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._context = context  # the last token whose text has been returned
        self._begin_run()

    def add(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        self._pending.append(token_id)
        if token_id not in self._byte_tokens:
            return self._release()
        self._look_ahead(token_id)
        return ""

    @property
    def ahead(self) -> str:
        return self._ahead

    def num_chars_before(self, token_id: int) -> int:
        if self._pending and self._counts(token_id) and token_id not in self._byte_tokens:
            return len(self._held())
        return len(self._ahead)

    def flush(self) -> str:
        return self._release() if self._pending else ""

    def _counts(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _begin_run(self) -> None:
        self._pending: list[int] = []
        self._ahead = ""
        self._run = codecs.getincrementaldecoder("utf-8")()
        self._is_valid = True

    def _look_ahead(self, token_id: int) -> None:
        """Add the characters that a byte token completes to `ahead`. A run with an invalid byte is one U+FFFD for each
        byte."""
        if self._is_valid:
            try:
                self._ahead += self._run.decode(self._byte_tokens[token_id])
            except UnicodeDecodeError:
                self._is_valid = False
        if not self._is_valid:
            self._ahead = INVALID * len(self._pending)

    def _held(self) -> str:
        known = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(known) :]

    def _release(self) -> str:
        text, self._context = self._held(), self._pending[-1:]
        self._begin_run()
        return text


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    def flatten(decoder: dict[str, Any] | None) -> list[str]:
        if decoder is None:
            return []
        if decoder["type"] == "Sequence":
            return [kind for part in decoder["decoders"] for kind in flatten(part)]
        # The end of an output cannot be stripped before it is known.
        return ["Strip at the end" if decoder.get("stop") else decoder["type"]]

    return flatten(json.loads(tokenizer.to_str())["decoder"])


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the byte of each token that stands for a single byte."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True).items()
    return {token_id: bytes([int(token[3:-1], 16)]) for token, token_id in vocabulary if _BYTE_TOKEN.fullmatch(token)}


def _byte_of_stand_in() -> dict[str, int]:
    """Return the byte of each character in GPT-2's token spelling: the byte's own character, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_STAND_IN: Final = _byte_of_stand_in()


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token stands for its own text."""
    try:
        return bytes([_BYTE_OF_STAND_IN[char] for char in token])
    except KeyError:
        return token.encode()
