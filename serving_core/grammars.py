"""What an answer is made to be: a grammar in llguidance's own form, and the tokens that it lets come next. Torch-free.

The API server makes the grammar of what a client asks for and compiles it, to refuse what cannot be enforced; each node
that chooses tokens of the answer compiles it again. What may follow depends on the grammar, the vocabulary and the
answer's tokens alone, so an answer goes on after a hand-over, a move or a restart as if nothing had happened. What a
node is given names the API server's vocabulary, since with another one masks would let other tokens come."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from serving_core.errors import ModelError, RequestError
from serving_core.heap import trim
from serving_core.reasons import BAD_PARAM, PAIRING_MISMATCH
from serving_core.tokenizer_files import read_tokenizer_files, vocabulary_digest

MAX_LEXER_STATES: Final = 25_000  # of one answer, at 1 to 2 kB each
MAX_PROBLEM_CHARS: Final = 160
MAX_KNOWN: Final = 16  # grammars, each ready to begin: a hundredth of the time that it takes to compile one
LIMITS: Final = LLParserLimits(
    max_lexer_states=MAX_LEXER_STATES,
    initial_lexer_fuel=200_000,  # expressions of a grammar, all repeats and references written out
    max_items_in_row=1000,  # ways to read an answer that end at the same byte
    step_max_items=10_000,  # of one mask
    verbose_errors=False,
)
MASKS_S: Final = 0.2  # of processor time that the masks of an answer may take
MASK_S: Final = 0.001  # more for each token: 50 times as much as schemas that are in use take


class GrammarGuide:
    """The state of one answer in its grammar; one thread at a time. An end token may come where the grammar may end,
    and nothing else where it must."""

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        """Raises RequestError when the matcher's grammar could not be compiled."""
        self._matcher = matcher
        self._num_tokens = num_tokens  # of the vocabulary
        self._num_taken = 0  # of the answer
        self._spent_s = 0.0
        self._check("cannot be compiled")

    def allowed(self, output: Sequence[int]) -> bytes:
        """As of serving_core.requests.Guide."""
        assert self._num_taken <= len(output), "an answer only grows"
        begun_s = time.thread_time()
        if new := list(output[self._num_taken :]):
            self._matcher.consume_tokens(new)
            self._check(f"does not allow of the {len(output)} tokens so far")
        self._num_taken = len(output)
        mask = self._matcher.compute_bitmask()
        self._check(f"goes no further after {len(output)} tokens")
        self._spent_s += time.thread_time() - begun_s
        if self._spent_s > MASKS_S + MASK_S * len(output):
            spent = f"{self._spent_s:.1f} s of processor time in {len(output)} tokens"
            limit = f"{MASKS_S:g} s and {1000 * MASK_S:g} ms a token"
            raise RequestError(BAD_PARAM, f"the grammar has taken {spent}, the limit is {limit}")
        return _first_bits(mask, self._num_tokens)

    def another(self) -> "GrammarGuide":
        """For an answer of its own, of a guide that no answer has begun with."""
        assert not self._num_taken, "an answer has begun with it"
        return GrammarGuide(self._matcher.deep_copy(), self._num_tokens)

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise RequestError(BAD_PARAM, f"the grammar {what}: {_sentence(self._matcher.get_error())}")


def whole_tokenizer(text: str, eos_token_ids: list[int]) -> LLTokenizer:
    """Of a tokenizer.json. Raises ValueError where the library does not read it."""
    return LLTokenizer(text, eos_token=eos_token_ids)


class Grammars:
    """Makes guides for the answers of one model; one thread at a time."""

    def __init__(
        self,
        folder: Path,
        eos_token_ids: Sequence[int],
        make: Callable[[str, list[int]], LLTokenizer] = whole_tokenizer,
    ) -> None:
        """Only with a whole tokenizer do guides have texts that have to come spelled as the model reads them."""
        self._folder = folder
        self._eos_token_ids = list(eos_token_ids)
        self._make = make
        self._tokenizer: LLTokenizer | None = None
        self._vocabulary = ""  # that it has, by its digest
        self._known = lru_cache(MAX_KNOWN)(self.compiled)

    @property
    def is_loaded(self) -> bool:
        """Return whether the model's tokenizer has been read."""
        return self._tokenizer is not None

    def load(self) -> LLTokenizer:
        """Reads the model's tokenizer, once; that takes a second for a large one. Raises RequestError when answers of
        this model cannot be kept to a grammar."""
        if self._tokenizer is None:
            self._tokenizer, self._vocabulary = self._read()
            trim()
        return self._tokenizer

    def _read(self) -> tuple[LLTokenizer, str]:
        try:
            tokenizer = read_tokenizer_files(self._folder).tokenizer
            ends = [token_id for token_id in self._eos_token_ids if tokenizer.id_to_token(token_id) is not None]
            if not ends:
                raise _impossible("the model has no end token")
            return self._make(tokenizer.to_str(), ends), vocabulary_digest(tokenizer)
        except (ModelError, ValueError) as error:  # of any kind; its text may name a file
            raise _impossible("llguidance does not read its tokenizer") from error

    def guide(self, grammar: str) -> GrammarGuide:
        """For an answer that has not begun, or that is to be taken over. Raises RequestError as `compiled` does."""
        return self._known(grammar).another()

    def compiled(self, grammar: str) -> GrammarGuide:
        """A guide that is not kept in mind. Raises RequestError when the grammar cannot be compiled within the limits,
        or no answer can begin."""
        tokenizer = self.load()
        guide = GrammarGuide(LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS), tokenizer.vocab_size)
        guide.allowed(())  # the first mask may fail too, and takes longest
        return guide

    def for_nodes(self, grammar: str) -> str:
        """What a node makes the same guide of, if it has the same vocabulary."""
        self.load()
        return f"{self._vocabulary} {grammar}"

    def guide_of(self, given: str) -> GrammarGuide:
        """The guide on a node, for what `for_nodes` gave. Raises RequestError as `guide` does, and where that was of
        another vocabulary."""
        self.load()
        vocabulary, _, grammar = given.partition(" ")
        if vocabulary != self._vocabulary:
            raise RequestError(PAIRING_MISMATCH, "the vocabularies of their tokenizers, which forms are enforced with")
        return self.guide(grammar)


def _impossible(why: str) -> RequestError:
    return RequestError(BAD_PARAM, f"answers of this model cannot be kept to a grammar: {why}")


def _first_bits(mask: bytes, count: int) -> bytes:
    """The mask's first so many bits, and zeros up to the end of their last byte."""
    num_whole, num_left = divmod(count, 8)
    if not num_left:
        return mask[:num_whole]
    return mask[:num_whole] + bytes([mask[num_whole] & (1 << num_left) - 1])


def _sentence(error: str) -> str:
    """What a client may read of an error of the library: its first line, or why a regular expression, which it shows
    on lines of their own, is none."""
    lines = error.strip().split("\n")
    why = next((each.removeprefix("error: ") for each in lines if each.startswith("error: ")), None)
    told = lines[0] if why is None else f"{why} in the regular expression {lines[1].strip()}"
    return told[:MAX_PROBLEM_CHARS]
