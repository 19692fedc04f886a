"""What a node counts and tells of itself, beside what can be worked out on paper."""

import pytest

from engine.engine import DRAFT, PARTS
from serving_core.figures import families
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepLoad
from serving_node.metrics import NodeExposition
from serving_node.outputs import StepCounts
from tests.unit.serving_node.runner_kit import carry_descriptors, fleet, make_request, running


def told_by(node):
    """Every sample by its name and the values of its labels but the node's."""
    figures = NodeExposition(node.node, node.sender, node.receiver).figures()
    samples = [sample for metric in families(figures) for sample in metric.samples]
    assert {sample.labels["node"] for sample in samples} == {node.name}
    return {
        " ".join([sample.name, *(value for label, value in sample.labels.items() if label != "node")]): sample.value
        for sample in samples
    }


def test_steps_are_counted_by_what_they_held():
    counts = StepCounts()
    chunk = StepLoad()
    chunk.add_chunk(0, 100)
    mixed = StepLoad(num_sequences=3)
    mixed.add_chunk(100, 20)
    for load, step_s in (
        (chunk, 0.5),
        (mixed, 0.25),
        (StepLoad(num_sequences=4), 0.125),
        (StepLoad(num_sequences=4), 0.125),
    ):
        counts.add(load, step_s)
    seconds = {phase: (sum(each.counts), each.sum) for phase, each in counts.seconds.items()}
    assert seconds == {"prefill": (1, 0.5), "mixed": (1, 0.25), "decode": (2, 0.25)}
    assert (counts.num_prompt_tokens, counts.num_output_tokens) == (120, 11)
    assert (sum(counts.tokens.counts), counts.tokens.sum) == (4, 131)
    assert (sum(counts.sequences.counts), counts.sequences.sum) == (4, 11)


def test_blocks_of_leases_that_nobody_has_are_leaked():
    allocator = BlockAllocator(8)
    mine, lost = allocator.allocate(3), allocator.allocate(2)
    assert allocator.num_leaked([mine, lost]) == 0
    assert allocator.num_leaked([mine]) == 2
    lost.release()
    assert allocator.num_leaked([mine]) == 0
    mine.release()
    assert allocator.num_leaked([]) == 0


async def test_a_prompt_of_its_own(tmp_path):
    async with running(tmp_path) as node:
        node.local("a", range(10), max_tokens=4)
        await node.idle()
        told = told_by(node)
        assert (told["splitserve_computed_tokens_total prefill"], told["splitserve_computed_tokens_total decode"]) == (
            10,
            3,
        )
        assert told["splitserve_step_seconds_count decode"] == 3
        assert told["splitserve_step_tokens_sum"] == 13
        assert told["splitserve_prefix_cache_queries_total"] == 10
        assert told["splitserve_prefix_cache_hits_total"] == told["splitserve_preemptions_total"] == 0
        assert told["splitserve_kv_blocks used"] == told["splitserve_kv_blocks_leaked"] == 0
        assert told["splitserve_kv_blocks cached"] == 3  # of 4 tokens each: 13 have KV, and the last block is not full
        assert told["splitserve_rank_resident_memory_bytes 0"] > 0
        parts = {part: told[f"splitserve_step_part_seconds_total {part}"] for part in PARTS}
        assert parts.pop(DRAFT) == 0
        assert min(parts.values()) > 0
        assert told["splitserve_draining"] == told["splitserve_step_age_seconds"] == 0
        facts = [node.engine.description.get(key, "") for key in ("device", "attention", "program")]
        assert told[f"splitserve_engine_info {' '.join(facts)}"] == 1
        node.node.drain()
        assert told_by(node)["splitserve_draining"] == 1


async def test_requests_stand_at_their_stages(tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=1) as node:
        node.local("a", range(10))
        node.local("b", range(20, 30))
        await node.until_step(1)
        told = told_by(node)
        stages = {key.rpartition(" ")[2]: value for key, value in told.items() if "stage_requests" in key}
        assert sum(stages.values()) == 2
        assert (stages["prefilling"], stages["waiting"]) == (1, 1)
        assert told["splitserve_kv_blocks used"] > told["splitserve_kv_blocks_leaked"] == 0
        node.engine.open()
        await node.idle()


async def test_transfers_count_at_both_ends(tmp_path):
    async with fleet(tmp_path, "reader", "writer") as (reader, writer):
        request = make_request("a", range(10), max_tokens=12)
        carry_descriptors(writer, reader)
        reader.prefill(request)
        writer.reserve(request)
        await reader.idle()
        await writer.idle()
        sent, received = told_by(reader), told_by(writer)
        name = "splitserve_transfer"
        assert sent[f"{name}_bytes_total out"] == received[f"{name}_bytes_total in"] == reader.load.num_kv_bytes > 0
        assert sent[f"{name}_seconds_count out"] == received[f"{name}_seconds_count in"] == 1
        assert sent[f"{name}_seconds_count in"] == received[f"{name}_seconds_count out"] == 0
        assert sent[f"{name}_failures_total out"] == received[f"{name}_failures_total in"] == 0


async def test_to_look_changes_nothing(tmp_path):
    async with running(tmp_path) as node:
        node.local("a", range(10))
        await node.idle()
        num_events = len(node.events)
        before = told_by(node)
        assert told_by(node).keys() == before.keys()
        assert len(node.events) == num_events


@pytest.mark.parametrize("name", ["prefill", "decode", "mixed"])
async def test_every_series_is_there_from_the_start(tmp_path, name):
    async with running(tmp_path) as node:
        told = told_by(node)
        assert told[f"splitserve_step_seconds_count {name}"] == 0
