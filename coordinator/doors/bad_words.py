"""Words that an answer is not to have, as the tokens that spell them."""

from collections.abc import Collection, Sequence

from coordinator.doors.validation import MAX_BAD_WORD_CHARS, bad
from coordinator.text.tokenizer import Tokenizer, TokenLimit

_LIMIT = TokenLimit(MAX_BAD_WORD_CHARS, lambda fewest: bad("bad_words", f"has one of at least {fewest} tokens"))


async def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> Collection[tuple[int, ...]]:
    """Of each word at a beginning, and behind a space."""
    texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}"))
    runs = [await tokenizer.encode(text, _LIMIT, add_special_tokens=False) for text in texts]
    return dict.fromkeys(tuple(run) for run in runs if run)
