"""Prefix hits of a model with a fixed state, on whole nodes: the tokens are those of transformers' `generate`."""

import pytest

from tests.transformers_models import PROMPTS, generated, write_transformers_model
from tests.unit.serving_node.runner_kit import carry_descriptors, fleet, make_request, running, told

NUM_TOKENS = 8
LONG = PROMPTS[2]  # 90 tokens, of blocks of four
AGAIN = [*LONG, 3, 1, 4]
BRANCHES = [[*LONG[:70], *tail] for tail in ([9, 9, 8], [8, 9], [7, 7])]


@pytest.fixture(params=["qwen3_5", "lfm2"])  # with a recurrent state, and with one of convolutions alone
def folder(request, tmp_path):
    return write_transformers_model(tmp_path / "model", request.param)


async def num_cached_of(node, name, prompt):
    """Return how many tokens of a prompt were cached, once it is answered."""
    node.local(name, prompt, max_tokens=NUM_TOKENS)
    await node.idle()
    return node.event(name, "first_token").num_cached_tokens


async def test_a_prefix_is_found_where_a_checkpoint_is(folder, tmp_path):
    """Behind a prompt's last full block, and where the prompts diverge, from the third on."""
    prompts = [LONG, AGAIN, *BRANCHES]
    async with running(tmp_path, num_blocks=400, engine={"model": str(folder)}) as node:
        found = [await num_cached_of(node, f"r{number}", prompt) for number, prompt in enumerate(prompts)]
        assert found == [0, 88, 0, 68, 68]
        assert node.load.num_cached_tokens == 88 + 68 + 68
        answers = generated(folder, prompts, NUM_TOKENS)
        assert [node.of(f"r{number}") for number in range(len(prompts))] == list(map(told, answers))


async def test_a_prompt_that_is_found_is_sent_with_its_state(folder, tmp_path):
    async with fleet(tmp_path, "writer", "reader", num_blocks=400, engine={"model": str(folder)}) as (writer, reader):
        carry_descriptors(writer, reader)
        for number in range(2):
            request = make_request(f"r{number}", AGAIN, max_tokens=NUM_TOKENS)
            reader.prefill(request)
            writer.reserve(request)
            await reader.idle()
            await writer.idle()
        assert reader.event("r1", "first_token").num_cached_tokens == 92
        [tokens] = generated(folder, [AGAIN], NUM_TOKENS)
        for number in range(2):
            assert reader.of(f"r{number}") == [*told(tokens[:1]), ("transferred", None)]
            assert [token for kind, token in writer.of(f"r{number}") if kind == "step_tokens"] == tokens[1:]


async def test_nothing_is_kept_where_each_token_behind_a_prefix_takes_a_call(tmp_path):
    folder = write_transformers_model(tmp_path / "model", "jamba")
    async with running(tmp_path, num_blocks=400, engine={"model": str(folder)}) as node:
        assert [await num_cached_of(node, name, LONG) for name in ("first", "again")] == [0, 0]
        assert len(node.engine.plans) == 2 * NUM_TOKENS


async def test_a_later_turn_is_found_behind_the_output_of_the_turn_before(folder, tmp_path):
    """Behind the last multiple of 64 tokens from the prompt's checkpoint at 88 on, as many as were generated."""
    async with running(tmp_path, num_blocks=400, engine={"model": str(folder)}) as node:
        node.local("first", LONG, max_tokens=150)
        await node.idle()
        output = [token for kind, token in node.of("first") if kind in ("first_token", "step_tokens")]
        turn = [*LONG, *output, 5, 1, 3]
        assert await num_cached_of(node, "second", turn) == 88 + 2 * 64
        [tokens] = generated(folder, [turn], NUM_TOKENS)
        assert node.of("second") == told(tokens)


async def test_a_node_that_decodes_a_prompt_of_another_node_prefills_the_later_turn_from_its_state(folder, tmp_path):
    """The first checkpoint is behind the first full block of the output, at 92."""
    async with fleet(tmp_path, "writer", "reader", num_blocks=400, engine={"model": str(folder)}) as (writer, reader):
        carry_descriptors(writer, reader)
        request = make_request("first", LONG, max_tokens=80)
        reader.prefill(request)
        writer.reserve(request)
        await reader.idle()
        await writer.idle()
        said = [*reader.of("first"), *writer.of("first")]
        output = [token for kind, token in said if kind in ("first_token", "step_tokens")]
        turn = [*LONG, *output, 5, 1, 3]
        assert await num_cached_of(writer, "second", turn) == 92 + 64
        [tokens] = generated(folder, [turn], NUM_TOKENS)
        assert writer.of("second") == told(tokens)
