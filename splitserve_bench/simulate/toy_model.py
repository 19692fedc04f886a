"""The model of a simulation: its next token follows from the one before and its place, so that whoever sees an answer
can tell whether each token is there once, in order, and of the right request."""

from collections.abc import Sequence

from serving_core.requests import SampledToken


class _Tokens(dict[int, SampledToken]):
    """By id, each made once: there are many in a step."""

    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id)
        return token


class ToyModel:
    """Knows nothing but the size of its vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens = _Tokens()

    def next_token(self, token_ids: Sequence[int]) -> SampledToken:
        """What follows these, one at least."""
        return self._tokens[(31 * token_ids[-1] + 17 * len(token_ids) + 7) % self._vocab_size]

    def check_answer(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Fails unless this is what the model says to the prompt, as far as it goes."""
        known = list(prompt)
        for token_id in answer:
            assert token_id == self.next_token(known).token_id, "an answer has a token of another one"
            known.append(token_id)
