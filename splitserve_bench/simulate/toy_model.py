"""The model of a simulation: its next token follows from the one before and its place, so that whoever sees an answer
can tell whether each token is there once, in order, and of the right request."""

from collections.abc import Iterable, Sequence

from serving_core.requests import Request


class ToyModel:
    """Knows nothing but the size of its vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def next_ids(self, requests: Iterable[Request]) -> list[int]:
        """What follows the tokens of each."""
        known = [request.token_ids for request in requests]
        return self._next([each[-1] for each in known], map(len, known))

    def following(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """So many tokens that follow these."""
        last, size, following = token_ids[-1], self._vocab_size, list[int]()
        for place in range(len(token_ids), len(token_ids) + num_tokens):
            last = (31 * last + 17 * place + 7) % size
            following.append(last)
        return following

    def check_answer(self, prompt: Sequence[int], answer: list[int]) -> None:
        """Fails unless this is what the model says to the prompt, as far as it goes."""
        places = range(len(prompt), len(prompt) + len(answer))
        expected = self._next([prompt[-1], *answer], places)
        assert answer == expected, "an answer has a token of another one"

    def _next(self, last_ids: Iterable[int], places: Iterable[int]) -> list[int]:
        """The tokens at these places, behind those."""
        size = self._vocab_size
        return [(31 * last + 17 * place + 7) % size for last, place in zip(last_ids, places, strict=False)]
