"""A tokenizer that knows its tokens, and cuts a text into the longest of them: a fraction of a whole one in memory.

For who tries grammars and chooses no token. What compiles does not depend on how texts are cut.
"""

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper


class _Tokens(TokenizerWrapper):
    """Those of a tokenizer, for one that is made of them."""

    def __init__(self, whole: LLTokenizer) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = whole.eos_token, None
        self.tokens = [whole.decode_bytes([token_id]) for token_id in range(whole.vocab_size)]
        self.special_token_ids = [*filter(whole.is_special_token, range(whole.vocab_size))]
        self.made: LLTokenizer | None = None

    def __call__(self, s: str) -> list[int]:
        assert self.made is not None, "texts come when it is made"
        return self.made.greedy_tokenize(s)


def tokens_alone(text: str, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Of a tokenizer.json. Raises ValueError where the library does not read it."""
    ends = list(eos_token_ids)
    tokens = _Tokens(LLTokenizer(text, eos_token=ends, slices=[]))
    tokens.made = LLTokenizer(tokens, eos_token=ends, slices=[])
    tokens.tokens, tokens.special_token_ids = (), ()  # the library has its own
    return tokens.made
