"""A KV pool of plain values: it tells whether what a scheduler's works read is the KV of their own tokens.

The KV of a token depends on all tokens before it. So a slot holds the salt and all tokens up to its own, and a block
used for the wrong request, too early, or written to while others read it shows at the next step.
"""

from hashlib import sha256

from serving_core.prefix import root_name

FINGERPRINT = {"model": "toy"}
NUM_TOKEN_IDS = 3
SPOILT = ("spoilt", ())


class ToyKV:
    """The slots of all blocks, and the model that writes and reads them."""

    def __init__(self, num_blocks, block_size):
        self._block_size = block_size
        self._slots = [[SPOILT] * block_size for _ in range(num_blocks)]

    def step(self, works):
        """Writes all works, then reads all back; gives the token that each work samples, if it does."""
        for work in works:
            self._write(work.request, work.block_ids, range(work.start, work.start + work.num_tokens))
        return [next_token(self._read(work)) for work in works if work.samples]

    def verify(self, works):
        """What a step has written and read is still there."""
        for work in works:
            self._check(work.request, work.block_ids, work.start + work.num_tokens)

    def receive(self, request, block_ids, num_cached_blocks):
        """What a transfer brings: all but the leading blocks, which must be there."""
        start = num_cached_blocks * self._block_size
        self._check(request, block_ids, start)
        self._write(request, block_ids, range(start, len(request.token_ids)))

    def spoil(self, block_ids, positions):
        """What a step or a transfer that fails leaves behind."""
        for position in positions:
            self._slots[block_ids[position // self._block_size]][position % self._block_size] = SPOILT

    def copy_from(self, source, source_ids, block_ids):
        """What a transfer moves: blocks of another pool, as they are."""
        for source_id, block_id in zip(source_ids, block_ids, strict=True):
            self._slots[block_id] = list(source._slots[source_id])

    def check_names(self, allocator):
        """Every block with a name is full of what the name stands for."""
        for block, name in allocator._name_of.items():
            salt, token_ids = self._slots[block][-1]
            expected = [(salt, token_ids[: end + 1]) for end in range(len(token_ids))]
            assert self._slots[block] == expected[-self._block_size :], f"block {block} has a name and is not full"
            assert name == name_of(salt, token_ids, self._block_size), f"block {block} has another block's name"

    def _write(self, request, block_ids, positions):
        for position in positions:
            content = (request.cache_salt, tuple(request.token_ids[: position + 1]))
            self._slots[block_ids[position // self._block_size]][position % self._block_size] = content

    def _read(self, work):
        self._check(work.request, work.block_ids, work.start + work.num_tokens)
        end = work.start + work.num_tokens - 1
        return self._slots[work.block_ids[end // self._block_size]][end % self._block_size][1]

    def _check(self, request, block_ids, num_tokens):
        for position in range(num_tokens):
            content = self._slots[block_ids[position // self._block_size]][position % self._block_size]
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


def name_of(salt, token_ids, block_size):
    """The name of the last of the full blocks of token_ids."""
    name = root_name(FINGERPRINT, salt)
    for start in range(0, len(token_ids), block_size):
        block = token_ids[start : start + block_size]
        name = sha256(name + b"".join(token.to_bytes(4, "little") for token in block)).digest()
    return name
