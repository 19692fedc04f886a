"""Text of an answer as its tokens come.

Whatever the tokens, the pieces that `add` and `flush` return are together what the tokenizer decodes from all of
them, and no piece ends within a character. How much must be held back for that depends on the tokenizer's decoder:

- byte-level (GPT-2, Llama 3, Qwen): a token is bytes, so only an unfinished UTF-8 character waits;
- all others (SentencePiece, WordPiece): the text of a token depends on the token before it, so a window of two is
  decoded. A run of byte tokens (<0xF0>) waits for its end: one invalid byte in it turns all of it into U+FFFD. What a
  run makes if it stays valid is known before (`ahead`), for who looks for stop strings and places of tokens.
"""

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

from serving_core.errors import ModelError

_WINDOWED: Final = {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_SPACE_STAND_IN: Final = "\u2581"  # SentencePiece writes a space so
INVALID: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """One answer's text."""

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; often empty."""

    @property
    def ahead(self) -> str:
        """The characters that `flush` would return, without one that is not whole yet. Other tokens may change them."""

    def num_chars_before(self, token_id: int) -> int:
        """Return how many of the characters that are held back come before this token, were it the next one."""

    def flush(self) -> str:
        """The rest, when no more tokens will come."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer. Raises ModelError when its decoder is of an unknown kind."""

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
        """Tokens of these texts are left out by no detokenizer to come."""
        self._special -= {self._tokenizer.token_to_id(text) for text in texts}

    def __call__(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> Detokenizer:
        """`after` are the tokens of a text that this one goes on with: decoders that drop the blank before a text's
        first word keep it then."""
        skipped = self._special if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self._tokenizer, skipped, self._token_bytes)
        known = (each for each in reversed(after) if each not in skipped and self._tokenizer.id_to_token(each))
        last = next(known, None)
        context = [] if last is None or last in self._byte_tokens else [last]
        return WindowDetokenizer(self._tokenizer, skipped, self._byte_tokens, context)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for within a text; empty for an id that is no token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _bytes_of(token)
        if token_id in self._byte_tokens:
            return self._byte_tokens[token_id]
        if _SPACE_STAND_IN in token:  # decoded alone it would lose the space before a word
            return token.replace(_SPACE_STAND_IN, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class ByteDetokenizer:
    """For byte-level decoders. `token_bytes` is a memory that may be shared; it grows to at most the vocabulary."""

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
        except UnicodeDecodeError:  # the character that has begun does not go on, and becomes U+FFFD
            return 1 if held else 0
        return 0

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text."""
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
    """For decoders that look at a token's neighbours. `byte_tokens` are those that ByteFallback joins; `context` is the
    token before the first one, if any."""

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], byte_tokens: Mapping[int, bytes], context: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._context = context  # the last token whose text is out
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
        """Add to `ahead` what a byte token completes. A run with an invalid byte is a U+FFFD for each of its bytes."""
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
        # Stripping the end of an answer cannot be done before its end is known.
        return ["Strip at the end" if decoder.get("stop") else decoder["type"]]

    return flatten(json.loads(tokenizer.to_str())["decoder"])


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The byte of each token that stands for one."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True).items()
    return {token_id: bytes([int(token[3:-1], 16)]) for token, token_id in vocabulary if _BYTE_TOKEN.fullmatch(token)}


def _byte_of_stand_in() -> dict[str, int]:
    """GPT-2 writes each byte of a token as one printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_STAND_IN: Final = _byte_of_stand_in()


def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token; an added token that was never bytes stands for its own text."""
    try:
        return bytes([_BYTE_OF_STAND_IN[char] for char in token])
    except KeyError:
        return token.encode()
