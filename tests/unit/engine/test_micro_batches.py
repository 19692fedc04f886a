"""A step in parts: together they are the step, and no block is torn apart."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.forward_batch import build_batch
from engine.micro_batches import LEAST_TOKENS, MOST_PER_STAGE, micro_batches
from serving_core.requests import Share

CPU = torch.device("cpu")


@st.composite
def shares(draw):
    """Chunks of prompts and steps of answers, scored or sampled or neither."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        start, num_tokens = draw(st.integers(0, 100)), draw(st.sampled_from([1, 2, 63, 64, 150, 400]))
        token_ids = [1000 * number + start + at for at in range(num_tokens)]
        num_scored = draw(st.integers(0, num_tokens - 1))
        found.append(Share(token_ids, start, range(number, 600 + number), draw(st.booleans()), num_scored, str(number)))
    return found


@given(shares(), st.integers(2, 4), st.sampled_from([1, 8, 16, 100]))
def test_the_parts_together_are_the_step(whole, num_stages, block_size):
    parts = micro_batches(whole, num_stages, block_size)
    step, batches = build_batch(whole, block_size, CPU), [build_batch(part, block_size, CPU) for part in parts]
    for name in ("token_ids", "positions", "slots"):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in batches]), getattr(step, name))
    wanted = torch.cat([batch.token_ids[batch.logit_rows] for batch in batches])
    assert torch.equal(wanted, step.token_ids[step.logit_rows])
    adapted = [(name, batch.token_ids[rows].tolist()) for batch in batches for name, rows in batch.adapted_rows.items()]
    for share in whole:
        assert [each for name, ids in adapted if name == share.adapter for each in ids] == share.token_ids


@given(shares(), st.integers(2, 4), st.sampled_from([1, 8, 16, 100]))
def test_prompts_are_cut_between_blocks_and_not_too_small(whole, num_stages, block_size):
    parts = micro_batches(whole, num_stages, block_size)
    starts = {share.adapter: share.start for share in whole}
    for share in (share for part in parts for share in part):
        assert share.start == starts[share.adapter] or share.start % block_size == 0
    sizes = [sum(share.num_tokens for share in part) for part in parts]
    assert len(parts) <= max(1, min(MOST_PER_STAGE * num_stages, sum(sizes) // LEAST_TOKENS))
    assert all(size >= LEAST_TOKENS for size in sizes[:-1])


def sizes_of(shares, num_stages):
    parts = micro_batches(shares, num_stages, 16)
    return [[share.num_tokens for share in part] for part in parts]


def test_steps_worked_out_by_hand():
    prompt = Share(range(512), 0, range(32), samples=True)
    assert sizes_of([prompt], 2) == [[64]] * 8
    assert sizes_of([Share(range(300), 5, range(20), samples=True)], 2) == [[75], [80], [80], [65]]
    answers = [Share([1], 30, range(2), samples=True)] * 100
    assert sizes_of(answers, 2) == [[1] * 100], "answers alone wait for the weights, not for each other"
    assert sizes_of([*answers[:30], Share(range(130), 0, range(9), samples=False)], 2) == [[1] * 30 + [64], [66]]
