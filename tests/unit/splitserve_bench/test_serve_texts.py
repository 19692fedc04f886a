"""Data sets of text: which requests they are, how they are sent, and files that cannot be used. The tests' tokenizer
has a token for each byte."""

import json
from collections import Counter
from random import Random

import pytest

from coordinator.text.tokenizer import TokenLimit, read_tokenizer
from splitserve_bench.compare.run import Workload
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.datasets import fit
from splitserve_bench.serve.options import Dataset
from splitserve_bench.serve.records import ServedModel
from splitserve_bench.serve.workload import Texts, workload_of
from tests.tiny_models import write_tokenizer
from tests.unit.splitserve_bench.bench_serve_kit import staged_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    write_tokenizer(made)
    return made


def conversation(*lengths):
    return {"id": "x", "conversations": [{"from": "human", "value": "x" * length} for length in lengths]}


KEPT = [(4, 4), (1024, 4), (4, 2044), (1024, 1024), (5, 6)]
LEFT_OUT = [(3, 4), (4, 3), (1025, 4), (4, 2045), (1024, 1025), (0, 9)]


def sharegpt(path, lengths):
    path.write_text(
        json.dumps([{"id": "y"}, conversation(), conversation(9), *(conversation(*one) for one in lengths)])
    )
    return path


def lines_of(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def as_they_stand(path, folder):
    return Texts("custom", path, folder, None, skips_chat_template=True)


async def test_a_custom_prompt_is_what_a_chat_of_it_is(folder, tmp_path):
    path = lines_of(tmp_path / "prompts.jsonl", [{"prompt": "ä <|eos|>", "output_tokens": 3}])
    (shape,) = Texts("custom", path, folder, None).shapes(9, Random(0))
    limit = TokenLimit(1000, lambda found: AssertionError(found))
    chat = await read_tokenizer(folder).encode_chat([{"role": "user", "content": "ä <|eos|>"}], limit)
    assert (list(shape.prompt), shape.output_tokens, shape.text) == (chat, 3, "")
    assert len(shape.prompt) > len(as_they_stand(path, folder).shapes(1, Random(0))[0].prompt)


def test_without_a_chat_template_prompts_are_sent_as_they_stand_or_not_at_all(tmp_path):
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    path = lines_of(tmp_path / "p", [{"prompt": "a"}])
    for source, said in ((None, "has no chat template: --skip-chat-template"), ("{{ raise_exception('No.') }}", "No")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": source}))
        with pytest.raises(BenchError, match=said):
            Texts("custom", path, tmp_path, None).shapes(1, Random(0))
        assert as_they_stand(path, tmp_path).shapes(1, Random(0))[0].text == "a"


def test_conversations_of_the_lengths_that_vllm_takes(folder, tmp_path):
    path = sharegpt(tmp_path / "chats.json", [*KEPT, *LEFT_OUT, (7, 8, 5000)])
    shapes = Texts("sharegpt", path, folder, None).shapes(100, Random(0))
    assert Counter((len(each.prompt), each.output_tokens) for each in shapes) == Counter([*KEPT, (7, 8)])
    assert all(bytes(each.prompt).decode() == each.text for each in shapes)


def test_an_answer_whose_length_is_given_may_be_short(folder, tmp_path):
    path = sharegpt(tmp_path / "chats.json", [*KEPT, *LEFT_OUT])
    shapes = Texts("sharegpt", path, folder, 1).shapes(100, Random(0))
    prompts = [prompt for prompt, _ in [*KEPT, *LEFT_OUT] if 4 <= prompt <= 1024]
    assert Counter((len(each.prompt), each.output_tokens) for each in shapes) == Counter((each, 1) for each in prompts)


def test_lines_have_256_tokens_where_they_tell_nothing_else(folder, tmp_path):
    rows = [{"prompt": "ä", "output_tokens": 3}, {"prompt": "bb", "more": 1}, {"prompt": "c", "output_tokens": None}]
    path = lines_of(tmp_path / "prompts.jsonl", rows)
    shapes = as_they_stand(path, folder).shapes(9, Random(0))
    assert {each.text: (len(each.prompt), each.output_tokens) for each in shapes} == {
        "ä": (2, 3),
        "bb": (2, 256),
        "c": (1, 256),
    }
    assert {each.output_tokens for each in Texts("custom", path, folder, 7).shapes(9, Random(0))} == {7}


def test_a_seed_draws_the_order_and_no_text_comes_twice(folder, tmp_path):
    texts = as_they_stand(lines_of(tmp_path / "p", [{"prompt": f"{i:02}"} for i in range(50)]), folder)
    drawn = [[each.text for each in texts.shapes(50, Random(seed))] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == set(drawn[2]) == {f"{i:02}" for i in range(50)}
    assert [each.text for each in texts.shapes(3, Random(1))] == drawn[0][:3]
    assert len(texts.shapes(51, Random(1))) == 50


def test_a_text_of_which_something_is_cut_off_is_sent_as_token_ids(folder, tmp_path):
    rows = [{"prompt": "a" * 10, "output_tokens": 90}, {"prompt": "b" * 70, "output_tokens": 90}]
    shapes = as_they_stand(lines_of(tmp_path / "p", rows), folder).shapes(2, Random(0))
    fitted = sorted(fit(shapes, 60).shapes, key=lambda each: each.prompt)
    assert [(each.prompt, each.output_tokens, each.text) for each in fitted] == [
        ((97,) * 10, 50, "a" * 10),
        ((98,) * 30, 30, ""),
    ]


BAD_FILES = {
    "no JSON": ("sharegpt", '[{"id": 1},\n{"id" 2}]', "file, line 2: no JSON: "),
    "no list": ("sharegpt", '{"conversations": []}', "file is no JSON list of conversations"),
    "depths": ("sharegpt", "[" * 100_000, "file is nested too deeply"),
    "a deep line": ("custom", "[" * 100_000, "file, line 1: line cannot be '[["),
    "an entry that is none": ("sharegpt", "[{}, 7]", "file, entry 2: conversations cannot be '7'"),
    "no turns": ("sharegpt", '[{"conversations": "hello"}]', "file, entry 1: conversations cannot be "),
    "a turn without text": (
        "sharegpt",
        '[{"conversations": [{"value": "hello"}, {"text": "you"}]}]',
        """file, entry 1: a turn's value cannot be "{'text': 'you'}\"""",
    ),
    "nothing that is kept": (
        "sharegpt",
        json.dumps([conversation(3, 9)]),
        "file has no requests, prompts of 4 to 1024",
    ),
    "no object": ("custom", '{"prompt": "a"}\n\n["b"]', "file, line 3: line cannot be "),
    "a line that is no JSON": ("custom", '{"prompt": "a"}\nhello', "file, line 2: line cannot be 'hello"),
    "no prompt": ("custom", '{"text": "a"}', "file, line 1: prompt cannot be 'None'"),
    "an empty prompt": ("custom", '{"prompt": ""}', "file, line 1: prompt cannot be ''"),
    "half a character": ("custom", '{"prompt": "\\ud800"}', "file, line 1: prompt cannot be "),
    "no answer": ("custom", '{"prompt": "a", "output_tokens": 0}', "file, line 1: output_tokens cannot be '0'"),
    "a part of a token": ("custom", '{"prompt": "a", "output_tokens": 2.5}', "line 1: output_tokens cannot be '2.5'"),
    "an empty file": ("custom", "\n", "file has no requests"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_what_cannot_be_used_is_named(folder, tmp_path, name, text, message):
    (tmp_path / "file").write_text(text)
    with pytest.raises(BenchError) as raised:
        Texts(name, tmp_path / "file", folder, None).shapes(1, Random(0))
    assert message in str(raised.value)


def test_a_file_that_is_no_text_is_named(folder, tmp_path):
    (tmp_path / "file").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(BenchError, match="file cannot be read: "):
        Texts("custom", tmp_path / "file", folder, None)


def test_a_comparison_draws_other_texts_for_every_seed(folder, tmp_path):
    rows = [{"prompt": f"{i:03}" * 10, "output_tokens": 40} for i in range(100)]
    data = Dataset("custom", str(lines_of(tmp_path / "p", rows)), skip_chat_template=True)
    workload = Workload(data, ServedModel("", 69, 260), folder)
    load = workload.load(2.0, 20, seed=1)
    assert load == workload.load(2.0, 20, seed=1)
    assert [each.text for each in load] != [each.text for each in workload.load(2.0, 20, seed=2)]
    assert load[-1].send_at_s == pytest.approx(20 / 2)
    assert {(len(each.prompt), each.output_tokens) for each in load} == {(30, 39)}
    assert workload.clipped_share() == 1
    assert len(workload.load(2.0, 500, seed=1)) == 100


def test_stages_begin_texts_anew(folder, tmp_path):
    path = lines_of(tmp_path / "p", [{"prompt": word} for word in "abc"])
    options = staged_options("1x7", dataset_name="custom", dataset_path=path, tokenizer=folder, skip_chat_template=True)
    planned = workload_of(options, 1000, 260).planned
    assert [sorted(each.text for each in planned[i : i + 3]) for i in (0, 3)] == [["a", "b", "c"]] * 2
