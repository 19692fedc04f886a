"""One prompt computed in many ways by an engine, on any device: the bits of its KV and of its logits."""

import random

import torch

from engine.forward_batch import build_batch
from serving_core.requests import Share
from tests.tiny_models import VOCAB_SIZE
from tests.unit.engine.company import BLOCKS_OF_ONE, Neighbour

MOST_NEIGHBOURS = 9
NUM_STEPS = 40


def prompt_of(num_tokens):
    return random.Random(7).choices(range(VOCAB_SIZE), k=num_tokens)


def num_blocks_for(num_tokens, block_size):
    """Of a pool that holds the prompt behind all its neighbours."""
    return (1 + MOST_NEIGHBOURS) * BLOCKS_OF_ONE + -(-num_tokens // block_size)


def chunks(num_tokens, size):
    return [min(size, num_tokens - start) for start in range(0, num_tokens, size)]


def random_cuts(num_tokens, seed):
    """Chunks and steps in a random order."""
    draw, cuts = random.Random(seed), []
    while (left := num_tokens - sum(cuts)) > 0:
        largest = draw.choice((1, 1, 3, 17, 150))
        for _ in range(draw.randint(1, 8)):
            cuts.append(min(left, draw.randint(1, largest)))
            left -= cuts[-1]
            if left == 0:
                break
    return cuts


class Stepping:
    """Another request that computes the same token again and again."""

    def __init__(self, index, rng):
        blocks = range(index * BLOCKS_OF_ONE, (index + 1) * BLOCKS_OF_ONE)
        self._share = Share([rng.randrange(VOCAB_SIZE)], rng.randrange(60), blocks, samples=True)

    def share(self):
        return self._share


def run_program(program, batch):
    """Return the logits that a decode program computes of a batch that it takes."""
    return program.run(batch, program.plan(batch), lambda: None).rows


def logits_of(engine, batch):
    """Return the logits of a batch as a step computes them: by the program if it takes the batch, or by the modules."""
    if engine.program is not None and engine.program.plan(batch) is not None:
        return run_program(engine.program, batch)
    return engine.model(batch, engine.attention)


@torch.inference_mode()
def play(engine, prompt, cuts, neighbours=(), seed=0, adapter=""):
    """The bytes of the prompt's KV; and the logits behind each cut, by the number of tokens before them."""
    rng, logits, start = random.Random(seed), {}, 0
    block_size, num_blocks = engine.layout.block_size, engine.num_blocks
    blocks = range(num_blocks - -(-len(prompt) // block_size), num_blocks)
    for num_tokens in cuts:
        end = start + num_tokens
        shares = [neighbour.share() for neighbour in neighbours]
        place = rng.randint(0, len(shares))
        shares.insert(place, Share(prompt[start:end], start, blocks, samples=True, adapter=adapter))
        row = logits_of(engine, build_batch(shares, block_size, engine.pool.device))[place]
        logits[end] = row.view(torch.uint8).tolist()
        start = end
    assert start == len(prompt)
    kv = [tuple(map(bytes, engine.pool.read(layer, blocks))) for layer in range(engine.layout.num_layers)]
    return kv, logits


def check_histories(engine, num_tokens):
    """Chunks of several sizes, steps, and both in company, against the prompt at once: not one bit differs."""
    prompt = prompt_of(num_tokens)
    whole, of_whole = play(engine, prompt, [num_tokens])
    stepped, expected = play(engine, prompt, [1] * num_tokens)
    assert stepped == whole
    assert expected[num_tokens] == of_whole[num_tokens]
    rng = random.Random(3)
    steps = [num_tokens - NUM_STEPS, *[1] * NUM_STEPS]
    histories = {f"chunks of {size}": (chunks(num_tokens, size), []) for size in (16, 100, 512)} | {
        f"a crowd of {count}": (random_cuts(num_tokens, count), [Neighbour(place, rng) for place in range(count)])
        for count in (1, 4, MOST_NEIGHBOURS)
    }
    histories["steps among steps"] = steps, [Stepping(place, rng) for place in range(MOST_NEIGHBOURS)]
    for name, (cuts, neighbours) in histories.items():
        kv, logits = play(engine, prompt, cuts, neighbours)
        assert kv == whole, name
        assert logits == {end: expected[end] for end in logits}, name
