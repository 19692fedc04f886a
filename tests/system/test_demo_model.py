"""The demo model, a real one with real prompts: float32, greedy, equal to transformers token for token."""

import pytest

from serving_core.errors import ModelError
from splitserve.launch import models
from tests.system.answers import ask_all, request
from tests.system.oracle import Reference

MAX_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a little",
    "def fibonacci(n):\n    ",
    "Q: What is 12 times 12?\nA:",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "Die Hauptstadt von Deutschland ist",
    "La tour Eiffel se trouve à",
    "1, 1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which plants",
    '"To be, or not to be" is a line from',
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n-",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox",
    "Naïve café — “quotes” and emoji 🙂 are",
    "A",
    "The history of the steam engine begins long before the industrial revolution. In the first century, Hero of "
    "Alexandria described a device in which steam from a heated vessel escaped through two bent pipes and made a "
    "sphere turn. It was a toy, and nobody thought of work. Some sixteen hundred years later, in the mines of "
    "England, water was the enemy: pits filled faster than horses could empty them. Thomas Savery patented a pump "
    "in 1698 that used steam to",
    "Summarize in one sentence: The mitochondrion is an organelle found in most cells, in which the biochemical "
    "processes of respiration and energy production occur.\nSummary:",
]
CHATS = ["What is the capital of Italy?", "Write a haiku about the sea.", "Why is the sky blue?"]


@pytest.fixture(scope="module")
def demo():
    try:
        return models.demo_folder(print)
    except ModelError as error:
        pytest.skip(f"no demo model here: {error}")


@pytest.mark.nightly
async def test_answers_equal_transformers(demo, start_cluster):
    cluster = start_cluster(
        demo, node={"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 96, "block_size": 16},
        prefill={"max_num_batched_tokens": 48}, decode={"max_num_seqs": 8},
    )  # fmt: skip
    async with cluster.connect() as stub:
        texts = await ask_all(stub, [request(prompt, max_tokens=MAX_TOKENS, temperature=0) for prompt in PROMPTS])
        turns = [[{"role": "user", "content": question}] for question in CHATS]
        told = await ask_all(stub, [request(turn, max_tokens=MAX_TOKENS, temperature=0) for turn in turns])
    cluster.wait_all_free()
    cluster.stop()

    reference = Reference(demo)
    tokenizer = reference.tokenizer
    questions = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    questions += [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"] for turn in turns
    ]
    for prompt, answer in zip(questions, texts + told, strict=True):
        expected = reference.greedy(prompt, MAX_TOKENS)
        assert answer.complete.prompt_tokens == len(prompt), tokenizer.decode(prompt)
        assert answer.token_ids == expected, tokenizer.decode(prompt)
        assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
