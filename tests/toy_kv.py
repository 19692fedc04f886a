"""A KV pool of plain values: it tells whether what a scheduler's works read is the KV of their own tokens.

The KV of a token depends on all tokens before it. So a slot holds the salt and all tokens up to its own, and a block
used for the wrong request, too early, or written to while others read it shows at the next step.

It depends also on how and where it was computed, and on the KV before it. So a slot tells that too, and a block has a
true name.
"""

from dataclasses import replace
from functools import lru_cache
from hashlib import sha256

from serving_core.node.prefix import CHUNK, EITHER, MIXED_NUMERICS, STEP, root_name
from serving_core.requests import Work

FINGERPRINT = {"model": "toy"}
NUM_TOKEN_IDS = 3
SPOILT = ("spoilt", (), None)
HERE, ELSEWHERE = b"-origin-", b"another-"
NUMERICS = (b"origin-0", b"origin-1")  # of a fleet's nodes


class ToyKV:
    """The slots of all blocks, and the model that writes and reads them."""

    def __init__(self, num_blocks, block_size, numerics=HERE, *, is_batch_invariant=False):
        self._block_size = block_size
        self._of_chunk, self._of_step = (numerics + (EITHER if is_batch_invariant else kind) for kind in (CHUNK, STEP))
        self._meant = {}  # what each name that was ever seen stands for
        self._slots = [[SPOILT] * block_size for _ in range(num_blocks)]

    def step(self, works, writing=()):
        """Writes all works, then reads all back; gives the tokens that works sample, as Work.take takes them. The
        requests of `writing` do a decode step."""
        for work in works:
            numerics_id = self._of_step if work.request in writing else self._of_chunk
            hoped = replace(work.request, token_ids=[*work.request.token_ids, *work.draft_tokens])
            end = work.start + work.num_tokens + len(work.draft_tokens)
            self._write(hoped, work.block_ids, range(work.start, end), numerics_id)
        return [token for work in works if work.samples for token in self._sample(work)]

    def _sample(self, work):
        tokens = [next_token(self._read(work))]
        for draft_token in work.draft_tokens:
            if tokens[-1] != draft_token:
                break
            grown = replace(work.request, token_ids=[*work.request.token_ids, *tokens])
            tokens.append(next_token(self._read(Work(grown, len(grown.token_ids) - 1, 1, work.block_ids))))
        return tokens

    def verify(self, works):
        """What a step has written and read is still there."""
        for work in works:
            self._check(work.request, work.block_ids, work.start + work.num_tokens)

    def receive(self, request, block_ids, num_cached_blocks):
        """What a transfer brings: all but the leading blocks, which must be there, from a like node that has read it
        all in chunks. Gives the numerics ids of all blocks that it fills or begins to."""
        num_tokens, num_blocks = len(request.token_ids), len(block_ids)
        start = num_cached_blocks * self._block_size
        self._check(request, block_ids, start)
        is_batch_invariant = self._of_chunk == self._of_step
        source = ToyKV(num_blocks, self._block_size, ELSEWHERE, is_batch_invariant=is_batch_invariant)
        source._write(request, range(num_blocks), range(num_tokens), source._of_chunk)
        self.copy_from(source, range(num_cached_blocks, num_blocks), block_ids[num_cached_blocks:])
        return [source._of_chunk] * -(-num_tokens // self._block_size)

    def spoil(self, block_ids, positions):
        """What a step or a transfer that fails leaves behind."""
        for position in positions:
            self._slots[block_ids[position // self._block_size]][position % self._block_size] = SPOILT

    def content(self, block_id):
        """A copy of a block."""
        return list(self._slots[block_id])

    def put(self, block_id, content):
        self._slots[block_id] = list(content)

    def spoil_blocks(self, block_ids):
        for block_id in block_ids:
            self._slots[block_id] = [SPOILT] * self._block_size

    def copy_from(self, source, source_ids, block_ids):
        """What a transfer moves: blocks of another pool, as they are."""
        for source_id, block_id in zip(source_ids, block_ids, strict=True):
            self._slots[block_id] = list(source._slots[source_id])

    def check_names(self, allocator):
        """Every block with a name is full of what the name stands for."""
        for name, block in allocator.blocks_by_name.items():
            salt, token_ids, _ = self._slots[block][-1]
            ends = range(len(token_ids) - self._block_size + 1, len(token_ids) + 1)
            expected = [(salt, token_ids[:end]) for end in ends]
            held = [slot[:2] for slot in self._slots[block]]
            assert held == expected, f"block {block} has a name and is not full"
            assert self._meant.setdefault(name, (salt, token_ids)) == (salt, token_ids), f"{block} has another's name"

    def check_table(self, request, block_ids, names, numerics_ids, allocator):
        """The names are those of these numerics ids, and the numerics ids those that have really made the blocks, up to
        one of mixed numerics. Behind one, names stand for the tokens alone.
        """
        names_by_block = {block: name for name, block in allocator.blocks_by_name.items()}
        name, is_exact = root_name(FINGERPRINT, request.cache_salt), True
        for index, numerics_id in enumerate(numerics_ids):
            token_ids = request.token_ids[index * self._block_size : (index + 1) * self._block_size]
            name = name_of(name, numerics_id, token_ids)
            assert names[index] == name, "a name is not that of its numerics_id"
            assert names_by_block.get(block_ids[index], name) == name, "the block goes by another name"
            is_exact = is_exact and numerics_id != MIXED_NUMERICS
            assert not is_exact or self.true_name(block_ids[index]) == name, "something else has made this block"

    def true_name(self, block):
        """What a full block is to be called after what really made it; where that is not one numerics id behind one
        history, something else.
        """
        marks = {mark for _, _, mark in self._slots[block]}
        token_ids = self._slots[block][-1][1][-self._block_size :]
        if len({(before, numerics_id[:-1]) for before, numerics_id in marks}) > 1:
            return repr(sorted(marks)).encode()
        before, numerics_id = max(marks)  # STEP is the greater one
        return name_of(before, numerics_id, token_ids)

    def _write(self, request, block_ids, positions, numerics_id):
        histories = {}  # of each block; what lies before it is whole by the time that it is written to
        for position in positions:
            index = position // self._block_size
            if index not in histories:
                histories[index] = self._history(request, block_ids[:index])
            mark = (histories[index], numerics_id)
            content = (request.cache_salt, tuple(request.token_ids[: position + 1]), mark)
            self._slots[block_ids[index]][position % self._block_size] = content

    def _history(self, request, block_ids):
        """What stands for all that has made these blocks, which lie in a row: the last one's true name, if each was
        computed behind those that lie before it."""
        history = root_name(FINGERPRINT, request.cache_salt)
        for block in block_ids:
            befores = {before for _, _, (before, _) in self._slots[block]}
            name = self.true_name(block)
            history = name if befores == {history} else sha256(history + name).digest()
        return history

    def _read(self, work):
        self._check(work.request, work.block_ids, work.start + work.num_tokens)
        end = work.start + work.num_tokens - 1
        return self._slots[work.block_ids[end // self._block_size]][end % self._block_size][1]

    def _check(self, request, block_ids, num_tokens):
        for position in range(num_tokens):
            content = self._slots[block_ids[position // self._block_size]][position % self._block_size][:2]
            expected = (request.cache_salt, tuple(request.token_ids[: position + 1]))
            assert content == expected, f"token {position} of request {request.request_id} would read {content}"


def next_token(token_ids):
    """The toy's answer to a context."""
    return (sum(token * (index + 1) for index, token in enumerate(token_ids)) + len(token_ids)) % NUM_TOKEN_IDS


def answer_of(token_ids, num_tokens):
    """The toy's whole answer to a prompt."""
    context = list(token_ids)
    for _ in range(num_tokens):
        context.append(next_token(context))
    return context[len(token_ids) :]


def name_of(before, numerics_id, token_ids):
    """The name of a block of these tokens behind another one."""
    return _name_of(before, numerics_id, tuple(token_ids))


@lru_cache(2**14)
def _name_of(before, numerics_id, token_ids):
    return sha256(before + numerics_id + b"".join(token.to_bytes(4, "little") for token in token_ids)).digest()
