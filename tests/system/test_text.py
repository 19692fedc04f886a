"""Text as it is streamed, worked out on paper: a token of the fake model is a byte, so characters come in pieces."""

import itertools

import pytest

from tests.system.answers import ask
from tests.system.oracle import fake_answer
from tests.tiny_models import EOS, VOCAB_SIZE, write_fake_model

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    cluster = start_cluster(write_fake_model(tmp_path_factory.mktemp("model")), ipc=True)
    yield cluster
    cluster.wait_all_free()


async def _ask(cluster, prompt, **fields):
    async with cluster.connect() as stub:
        return await ask(stub, prompt, **{**GREEDY, **fields})


def _decode(token_ids):
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def _prompt_for_character(num_bytes):
    """A prompt whose answer begins with a character of that many bytes."""
    for length, last in itertools.product(range(1, VOCAB_SIZE), range(256)):
        prompt = [0] * (length - 1) + [last]
        first = _decode(fake_answer(prompt, num_bytes))
        if len(first) == 1 and first != "\ufffd" and len(first.encode()) == num_bytes:
            return prompt
    raise AssertionError(f"no character of {num_bytes} bytes")


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
async def test_a_character_comes_whole(cluster, num_bytes):
    prompt = _prompt_for_character(num_bytes)
    expected = fake_answer(prompt, 60)
    answer = await _ask(cluster, prompt, max_tokens=60)
    assert answer.token_ids == expected
    assert answer.text == _decode(expected)
    assert next(piece for piece in answer.texts if piece)[0] == _decode(expected[:num_bytes])


@pytest.mark.parametrize("num_bytes", [2, 3, 4])
async def test_an_answer_that_ends_within_a_character(cluster, num_bytes):
    prompt = _prompt_for_character(num_bytes)
    answer = await _ask(cluster, prompt, max_tokens=num_bytes - 1)
    assert answer.token_ids == fake_answer(prompt, num_bytes - 1)
    assert answer.text in ("", "\ufffd")  # transformers' decode gives the replacement character


async def test_a_stop_string_of_several_bytes(cluster):
    prompt = _prompt_for_character(3)
    character = _decode(fake_answer(prompt, 3))
    answer = await _ask(cluster, prompt, max_tokens=60, stop=[character])
    assert answer.text == ""
    assert answer.finish_reason == "STOP"
    assert answer.complete.matched_stop_str == character


async def test_eos_is_counted_and_not_shown(cluster):
    prompts = ([0] * length + [last] for length, last in itertools.product(range(20), range(256)))
    prompt = next(prompt for prompt in prompts if EOS in fake_answer(prompt, 200)[1:])
    expected = fake_answer(prompt, 200)
    expected = expected[: expected.index(EOS) + 1]
    answer = await _ask(cluster, prompt, max_tokens=200, ignore_eos=False)
    assert answer.token_ids == expected
    assert answer.text == _decode(expected)
    assert answer.finish_reason == "STOP"


async def test_eos_as_the_very_first_token(cluster):
    prompt = next(p for p in ([1, 2, number] for number in range(256)) if fake_answer(p, 1) == [EOS])
    answer = await _ask(cluster, prompt, max_tokens=50, ignore_eos=False)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([EOS], "", "STOP")
    assert answer.complete.completion_tokens == 1
