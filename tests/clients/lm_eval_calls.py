"""EleutherAI's evaluation harness: its own client scores prompts at our endpoint as its `hf` backend does by itself."""

import json
import os
import random

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

MODEL = os.environ["MODEL_FOLDER"]
NUM_DOCUMENTS = 12
HF = {"pretrained": MODEL, "dtype": "float32"}
OURS = {
    "model": "tiny",
    "base_url": f"{os.environ['OPENAI_BASE_URL']}/completions",
    "tokenizer": MODEL,
    "tokenizer_backend": "huggingface",
    "max_length": 1024,
}
CHOICE = {
    "task": "made_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "task": "made_rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
TASKS = (CHOICE, ROLLING)


def words(rng, number):
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(number))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Of documents made at random: of four answers one counts as right."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(13)
    documents = [
        {"question": words(rng, 9), "choices": [words(rng, 2) for _ in range(4)], "label": rng.randrange(4)}
        for _ in range(NUM_DOCUMENTS)
    ]
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for task in TASKS:
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **source, "metadata": {"version": 1}}))
    return TaskManager(include_path=str(folder))


def evaluated(tasks, model, batch_size, model_args):
    names = [task["task"] for task in TASKS]
    return lm_eval.simple_evaluate(
        model, model_args, tasks=names, task_manager=tasks, batch_size=batch_size, device="cpu", bootstrap_iters=0
    )


@pytest.fixture(scope="module")
def expected(tasks):
    return evaluated(tasks, "hf", 1, HF)


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 4}, {"batch_size": 4}], ids=str)
def test_scores_are_those_of_the_hf_backend(tasks, expected, options):
    options = dict(options)
    told = evaluated(tasks, "local-completions", options.pop("batch_size", 1), OURS | options)
    for ours, theirs in zip(scores(told, CHOICE), scores(expected, CHOICE), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
        assert ours[1] == theirs[1], "whether it is the greedy answer"
    assert told["results"]["made_choice"]["acc,none"] == expected["results"]["made_choice"]["acc,none"]
    assert bits(told) == pytest.approx(bits(expected), abs=1e-4)


def scores(results, task):
    """The logprob of each choice of each document, and whether it is what the model would say."""
    samples = sorted(results["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    found = [(float(told[0]), bool(told[1])) for sample in samples for told in sample["filtered_resps"]]
    assert len(found) == 4 * NUM_DOCUMENTS
    return found


def bits(results):
    return results["results"]["made_rolling"]["bits_per_byte,none"]
