"""The model that the simulated nodes compute. Its KV of a token depends on all tokens before it, and on the layer, and
is worked out from the KV of the token before, as it lies in the pool; its next token depends on all bytes of all KV. So
whatever is stale, lost, late, of another request or of another layer gives another token.
"""

from itertools import chain

from xxhash import xxh3_64_digest, xxh3_64_intdigest

VOCAB_SIZE = 50_000
NUM_LAYERS = 2
KEY_BYTES = VALUE_BYTES = 8


def first_key(salt):
    """What stands before the first token."""
    return xxh3_64_digest(salt.encode())


def key_after(before, token_id, layer):
    """K of a token, by K of the one before it."""
    return xxh3_64_digest(before + token_id.to_bytes(4, "little"), layer)


def value_of(token_id, position):
    """V of a token."""
    return token_id.to_bytes(4, "little") + position.to_bytes(4, "little")


def next_token(caches):
    """What follows, by K and V of all tokens in the first layer, then in the next one."""
    return xxh3_64_intdigest(b"".join(caches)) % VOCAB_SIZE


def answer_of(prompt, num_tokens, salt):
    """The whole answer, worked out without blocks, nodes and transfers."""
    keys = [bytearray() for _ in range(NUM_LAYERS)]
    values, before = bytearray(), [first_key(salt)] * NUM_LAYERS
    answer = []
    for position in range(len(prompt) + num_tokens - 1):
        token_id = prompt[position] if position < len(prompt) else answer[-1]
        values += value_of(token_id, position)
        for layer in range(NUM_LAYERS):
            before[layer] = key_after(before[layer], token_id, layer)
            keys[layer] += before[layer]
        if position >= len(prompt) - 1:
            answer.append(next_token(list(chain.from_iterable((each, values) for each in keys))))
    return answer
