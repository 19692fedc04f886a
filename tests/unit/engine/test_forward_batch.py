import dataclasses
import random

import torch

from engine.forward_batch import build_batch, next_batch
from serving_core.requests import Request, SamplingParams, Share, Work

CPU = torch.device("cpu")


def request(token_ids, num_prompt_tokens=None):
    return Request("r", 0, token_ids, num_prompt_tokens or len(token_ids), SamplingParams(max_tokens=9))


def test_a_chunk_a_last_chunk_and_a_decode():
    works = [
        Work(request([10, 11, 12, 13, 14]), 1, 3, [7, 2]),  # not yet at its last token
        Work(request([20, 21, 22, 23, 24]), 2, 3, [5, 0, 9]),  # one block more than needed so far
        Work(request([30, 31, 32], 2), 2, 1, [4]),
    ]
    batch = build_batch([work.share for work in works], 4, CPU)
    assert batch.token_ids.tolist() == [11, 12, 13, 22, 23, 24, 32]
    assert batch.positions.tolist() == [1, 2, 3, 2, 3, 4, 2]
    assert batch.slots.tolist() == [29, 30, 31, 22, 23, 0, 18]  # block * 4 + position % 4
    assert batch.query_starts.tolist() == [0, 3, 6, 7]
    assert batch.kv_lengths.tolist() == [4, 5, 3]
    assert batch.block_tables.tolist() == [[7, 0], [5, 0], [4, 0]]
    assert batch.logit_rows.tolist() == [5, 6]


def test_a_part_is_what_its_requests_would_be_alone():
    shares = [
        Share([1], 4, [7, 2], True),
        Share([2, 3], 0, [5], False, adapter="a"),
        Share([4, 5, 6], 1, [4], True),
        Share([7], 9, [3, 6, 1], True),
    ]
    whole = build_batch(shares, 4, CPU)
    part = whole.part(1, 3)
    assert (part.token_ids.tolist(), part.positions.tolist()) == ([2, 3, 4, 5, 6], [0, 1, 1, 2, 3])
    assert part.slots.tolist() == [20, 21, 17, 18, 19]
    assert part.query_starts.tolist() == part.starts == [0, 2, 5]
    assert (part.kv_lengths.tolist(), part.block_tables.tolist()) == ([2, 4], [[5, 0, 0], [4, 0, 0]])
    assert (part.longest_query, part.longest_context, part.context_lengths) == (3, 4, [2, 4])
    assert (part.logit_rows.tolist(), part.adapted_rows) == ([], {})
    assert part.kv_lengths.data_ptr() == whole.kv_lengths[1:].data_ptr(), "a view"
    assert part.query_starts.dtype == torch.int32


def test_rows_by_adapter():
    shares = [
        Share([1, 2], 0, [0], True, adapter="b"),
        Share([3], 4, [1, 2], True),
        Share([4, 5, 6], 1, [3], False, adapter="a"),
        Share([7], 0, [4], True, adapter="b"),
    ]
    rows = build_batch(shares, 4, CPU).adapted_rows
    assert {adapter: of_adapter.tolist() for adapter, of_adapter in rows.items()} == {"b": [0, 1, 6], "a": [3, 4, 5]}
    assert build_batch(shares[1:2], 4, CPU).adapted_rows == {}


def test_dtypes_are_those_that_cuda_kernels_take():
    batch = build_batch([Share([1], 0, [3], True)], 4, CPU)
    int32 = (batch.query_starts, batch.kv_lengths, batch.block_tables)
    int64 = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
    assert {tensor.dtype for tensor in int32} == {torch.int32}
    assert {tensor.dtype for tensor in int64} == {torch.int64}


def test_the_batch_behind_another_is_the_one_that_is_built_from_its_requests():
    draw = random.Random(0)
    for block_size in (1, 2, 4, 16):
        tables = [draw.sample(range(200), 64 // block_size + 1) for _ in range(draw.randint(1, 5))]
        starts = [draw.randint(0, 30) for _ in tables]
        adapters = [draw.choice(["", "a", "b"]) for _ in tables]

        def built(step, tables=tables, starts=starts, adapters=adapters, block_size=block_size):
            shares = [
                Share((0,), start + step, table, True, adapter=adapter)
                for table, start, adapter in zip(tables, starts, adapters, strict=True)
            ]
            return build_batch(shares, block_size, CPU)

        batch = built(0)
        for step in range(1, 25):
            before, batch = batch, next_batch(batch, tables, block_size, CPU)
            batch.know(list(range(len(tables))))
            expected = built(step)
            expected.know(list(range(len(tables))))
            for field in dataclasses.fields(batch):
                ours, theirs = getattr(batch, field.name), getattr(expected, field.name)
                if isinstance(ours, torch.Tensor):
                    assert ours.dtype == theirs.dtype
                    ours, theirs = ours.tolist(), theirs.tolist()
                elif isinstance(ours, dict):
                    ours, theirs = ({name: rows.tolist() for name, rows in each.items()} for each in (ours, theirs))
                assert ours == theirs, (field.name, block_size, step)
            assert before.positions.tolist() == built(step - 1).positions.tolist(), "it may be in use"
            assert before.block_tables.tolist() == built(step - 1).block_tables.tolist(), "it may be in use"
