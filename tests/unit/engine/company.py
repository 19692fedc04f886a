"""Other requests for an engine's steps, and which kernels this machine has."""

from dataclasses import replace

from engine.native.library import OFF, native_library
from engine.native.linear_library import linear_library
from engine.native.ops_library import ops_library
from serving_core.requests import Request, SamplingParams, Work
from tests.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 4
BLOCKS_OF_ONE = 16  # blocks of each neighbour
EVERY_LOGPROB = SamplingParams(max_tokens=100, temperature=0, logprobs=VOCAB_SIZE, ignore_eos=True)


class Neighbour:
    """Another request: a chunk of a prompt of some length, then a few decode steps, then another prompt."""

    def __init__(self, index, rng, adapter=""):
        self._rng = rng
        self._adapter = adapter
        self._blocks = range(index * BLOCKS_OF_ONE, (index + 1) * BLOCKS_OF_ONE)
        self._request = None
        self._num_computed = self._end = 0

    def work(self):
        if self._request is None or self._num_computed >= self._end:
            token_ids = self._rng.choices(range(VOCAB_SIZE), k=BLOCKS_OF_ONE * BLOCK_SIZE)
            self._request = Request("other", 0, token_ids, len(token_ids), EVERY_LOGPROB, adapter=self._adapter)
            start, num_tokens = 0, self._rng.randint(1, 50)
            self._end = num_tokens + self._rng.randint(0, 10)
        else:
            start, num_tokens = self._num_computed, 1
        self._num_computed = start + num_tokens
        return Work(self._request, start, num_tokens, self._blocks)

    def share(self):
        """The same, with the logits of its last token."""
        return replace(self.work().share, samples=True)


def has_variant(variant):
    """Whether this CPU and installation have all kernels of it."""
    if variant in ("", OFF):
        return True
    library, ops, linear = native_library(), ops_library(), linear_library()
    return (
        library is not None
        and library.kernel(variant, "float32", "float32") is not None
        and ops.kernel(variant) is not None
        and linear.kernel("avx512_vnni" if variant == "avx512" else variant) is not None
    )
