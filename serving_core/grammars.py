"""Constrain outputs by grammars in llguidance's form, and compute the tokens that may come next. Torch-free.

The API server builds the grammar of a client's request and compiles it, to refuse a grammar that cannot be enforced;
each node that samples tokens of the output compiles it again. The allowed tokens depend only on the grammar, the
vocabulary and the output's tokens, so a KV transfer, a migration or a restart changes nothing. The grammar sent to a
node names the API server's vocabulary, since masks of another vocabulary would allow other tokens.
"""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from serving_core.errors import ModelError, RequestError
from serving_core.model_files.tokenizer_files import read_tokenizer_files, vocabulary_digest
from serving_core.process.heap import trim
from serving_core.reasons import BAD_PARAM, PAIRING_MISMATCH

MAX_LEXER_STATES: Final = 25_000  # of one output, at 1 to 2 kB each
MAX_PROBLEM_CHARS: Final = 160
MAX_KNOWN: Final = 16  # compiled grammars kept: a copy takes a hundredth of the time of compiling
LIMITS: Final = LLParserLimits(
    max_lexer_states=MAX_LEXER_STATES,
    initial_lexer_fuel=200_000,  # expressions of a grammar, with all repeats and references expanded
    max_items_in_row=1000,  # ways to parse an output that end at the same byte
    step_max_items=10_000,  # of one mask
    verbose_errors=False,
)
MASKS_S: Final = 0.2  # processor time that the masks of an output may take
MASK_S: Final = 0.001  # more for each token: 50 times as much as schemas in use take


class GrammarGuide:
    """Keep one output within its grammar; for one thread at a time.

    An end token is allowed where the grammar may end, and only an end token where it must.
    """

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        """Wrap a matcher at the start of an output; `num_tokens` is the size of the vocabulary.

        Raises RequestError if the matcher's grammar could not be compiled.
        """
        self._matcher = matcher
        self._num_tokens = num_tokens  # of the vocabulary
        self._num_taken = 0  # of the output
        self._spent_s = 0.0
        self._check("cannot be compiled")

    def allowed(self, output: Sequence[int]) -> bytes:
        """Return the tokens that may follow `output`: bit b of byte i allows token 8 i + b.

        `output` must extend that of the call before. Raises RequestError if `output` violates the grammar, and when the
        masks of the output have taken more than MASKS_S + MASK_S per token of processor time.
        """
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
        """Return a guide of the same grammar for another output. Requires that no output has begun with this guide."""
        assert not self._num_taken, "an answer has begun with it"
        return GrammarGuide(self._matcher.deep_copy(), self._num_tokens)

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise RequestError(BAD_PARAM, f"the grammar {what}: {_sentence(self._matcher.get_error())}")


def whole_tokenizer(text: str, eos_token_ids: list[int]) -> LLTokenizer:
    """Return llguidance's tokenizer of a tokenizer.json, whose contents are `text`.

    Raises ValueError if the library cannot read it.
    """
    return LLTokenizer(text, eos_token=eos_token_ids)


class Grammars:
    """Make guides for the outputs of one model; for one thread at a time. Compiled grammars are cached."""

    def __init__(
        self,
        folder: Path,
        eos_token_ids: Sequence[int],
        make: Callable[[str, list[int]], LLTokenizer] = whole_tokenizer,
    ) -> None:
        """Prepare for the model in `folder`; nothing is read yet.

        `make` builds the tokenizer from tokenizer.json and the end tokens. Only with a whole tokenizer do guides
        require texts in the model's own tokenization.
        """
        self._folder = folder
        self._eos_token_ids = list(eos_token_ids)
        self._make = make
        self._tokenizer: LLTokenizer | None = None
        self._vocabulary = ""  # digest of its vocabulary
        self._known = lru_cache(MAX_KNOWN)(self.compiled)

    @property
    def is_loaded(self) -> bool:
        """Return whether the model's tokenizer has been read."""
        return self._tokenizer is not None

    def load(self) -> LLTokenizer:
        """Read the model's tokenizer at the first call, which takes a second for a large one, and return it.

        Raises RequestError if grammars cannot constrain this model.
        """
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
        except (ModelError, ValueError) as error:  # of any kind; the text may name a file
            raise _impossible("llguidance does not read its tokenizer") from error

    def guide(self, grammar: str) -> GrammarGuide:
        """Return a guide for a new output of the grammar, from the cache if possible.

        Raises RequestError if the grammar cannot be compiled within the limits, or allows no output.
        """
        return self._known(grammar).another()

    def compiled(self, grammar: str) -> GrammarGuide:
        """Compile a grammar, and return its guide, which is not cached.

        Raises RequestError if the grammar cannot be compiled within the limits, or allows no output.
        """
        tokenizer = self.load()
        guide = GrammarGuide(LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS), tokenizer.vocab_size)
        guide.allowed(())  # the first mask may fail too, and takes longest
        return guide

    def for_nodes(self, grammar: str) -> str:
        """Return the grammar with the digest of the vocabulary before it, which `guide_of` takes on a node.

        Raises RequestError if grammars cannot constrain this model.
        """
        self.load()
        return f"{self._vocabulary} {grammar}"

    def guide_of(self, given: str) -> GrammarGuide:
        """Return the guide for a text that `for_nodes` made in another process.

        Raises RequestError if that process has another vocabulary, if grammars cannot constrain this model, or if the
        grammar cannot be compiled within the limits or allows no output.
        """
        self.load()
        vocabulary, _, grammar = given.partition(" ")
        if vocabulary != self._vocabulary:
            raise RequestError(PAIRING_MISMATCH, "the vocabularies of their tokenizers, which forms are enforced with")
        return self.guide(grammar)


def _impossible(why: str) -> RequestError:
    return RequestError(BAD_PARAM, f"outputs of this model cannot be kept to a grammar: {why}")


def _first_bits(mask: bytes, count: int) -> bytes:
    """Return the mask's first `count` bits, padded with zeros to a whole byte."""
    num_whole, num_left = divmod(count, 8)
    if not num_left:
        return mask[:num_whole]
    return mask[:num_whole] + bytes([mask[num_whole] & (1 << num_left) - 1])


def _sentence(error: str) -> str:
    """Return a library error as clients may read it: its first line, or the reason why a regular expression is invalid,
    which the library shows on separate lines.
    """
    lines = error.strip().split("\n")
    why = next((each.removeprefix("error: ") for each in lines if each.startswith("error: ")), None)
    told = lines[0] if why is None else f"{why} in the regular expression {lines[1].strip()}"
    return told[:MAX_PROBLEM_CHARS]
