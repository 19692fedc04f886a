"""Texts to token ids and back, and tokens that only tokenizer_config.json has, against transformers."""

import asyncio
import json

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from coordinator.text.tokenizer import (
    LONG_TEXT_CHARS,
    MIN_LONGEST_TOKEN_CHARS,
    NUM_THREADS,
    PIECE_CHARS,
    read_tokenizer,
)
from serving_core.errors import ModelError, RequestError
from tests.effort import few
from tests.tiny_models import ASSISTANT, BOS, EOS, VOCAB_SIZE
from tests.unit.coordinator.later import transformers
from tests.unit.coordinator.tokenizer_kit import ENOUGH, edit_config, limit


def test_texts_encode_as_in_transformers(folder):
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = read_tokenizer(folder)
    for text in ("a", "héllo wörld 😀", "<|user|>x", " lead and trail ", "long " * LONG_TEXT_CHARS):
        assert asyncio.run(tokenizer.encode(text, ENOUGH)) == reference(text)["input_ids"]


def test_tokens_are_written_as_in_transformers_and_tell_their_bytes(folder):
    reference, tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder), read_tokenizer(folder)
    token_ids = [*"héllo 😀".encode(), EOS]
    tokens = asyncio.run(tokenizer.tokens(token_ids))
    assert tokens == reference.convert_ids_to_tokens(token_ids)
    assert reference.convert_tokens_to_ids(tokens) == token_ids
    assert asyncio.run(tokenizer.tokens([10**6])) == [""]


def test_the_event_loop_goes_on_while_many_tokens_become_texts(folder):
    async def scenario():
        token_ids = [97] * (2 * LONG_TEXT_CHARS)
        texts = asyncio.create_task(read_tokenizer(folder).tokens(token_ids))
        await asyncio.sleep(0)
        assert not texts.done()
        assert await texts == ["a"] * len(token_ids)

    asyncio.run(scenario())


def test_a_hopeless_text_is_refused_before_any_of_it_is_encoded(folder):
    encoding = read_tokenizer(folder).encode("a" * 2**22, limit(8192))
    with pytest.raises(RequestError, match=f"{2**22 // MIN_LONGEST_TOKEN_CHARS} or more"):
        encoding.send(None)  # until it waits, which it never does


def test_a_text_that_is_probably_too_long_is_encoded_no_further_than_that_shows(folder):
    with pytest.raises(RequestError, match=f"{PIECE_CHARS - MIN_LONGEST_TOKEN_CHARS} or more"):
        asyncio.run(read_tokenizer(folder).encode("a" * 2**20, limit(10_000)))


def test_a_text_of_long_tokens_may_be_long(folder):
    text = "<|assistant|>" * 9_990
    assert len(text) > 10 * 10_000
    assert asyncio.run(read_tokenizer(folder).encode(text, limit(10_000))) == [ASSISTANT] * 9_990


def test_who_stops_waiting_leaves_the_queue_and_the_others_keep_their_order(folder, gate):
    async def scenario():
        tokenizer, ended = read_tokenizer(folder), []
        texts = {char: char * (LONG_TEXT_CHARS + 1) for char in "abc"}
        busy = [asyncio.create_task(tokenizer.encode(texts["a"], ENOUGH)) for _ in range(NUM_THREADS)]
        calls = {char: asyncio.create_task(tokenizer.encode(text, ENOUGH)) for char, text in texts.items()}
        for char, call in calls.items():
            call.add_done_callback(lambda _, char=char: ended.append(char))
        await asyncio.sleep(0)
        calls["b"].cancel()
        await asyncio.gather(calls["b"], return_exceptions=True)
        assert ended == ["b"]  # at once, while all threads are busy
        gate.open()
        assert await calls["c"] == [ord("c")] * len(texts["c"])
        await asyncio.gather(*busy, *calls.values(), return_exceptions=True)
        assert sorted(ended) == ["a", "b", "c"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("template", "changes", "embeds", "expected", "num_end_tokens"),
    [
        (None, {}, True, [97], 0),
        (None, {"add_eos_token": True}, False, [97], 0),
        (None, {"add_eos_token": True}, True, [97, EOS], 1),
        ("<|bos|> $A", {"add_eos_token": True}, True, [BOS, 97, EOS], 1),
        ("$A <|eos|>", {"add_eos_token": True}, True, [97, EOS], 1),
        ("<|bos|> $A <|eos|> <|eos|>", {}, False, [BOS, 97, EOS, EOS], 2),
        (None, {"add_eos_token": True, "eos_token": None}, True, [97], 0),
        (None, {"add_eos_token": True, "eos_token": "of no vocabulary"}, True, [97, VOCAB_SIZE], 1),
    ],
)
def test_texts_to_be_embedded_end_as_the_folder_says(folder, template, changes, embeds, expected, num_end_tokens):
    if template:
        path = folder / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(path))
        special_tokens = [("<|bos|>", BOS), ("<|eos|>", EOS)]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special_tokens)
        tokenizer.save(str(path))
    edit_config(folder, **changes)
    tokenizer = read_tokenizer(folder, embeds=embeds)
    assert asyncio.run(tokenizer.encode("a", ENOUGH)) == expected
    assert tokenizer.num_end_tokens == num_end_tokens


def test_the_tokenizers_own_special_tokens_are_added_and_its_limits_are_not(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}},
    }
    path.write_text(json.dumps(content))
    assert asyncio.run(read_tokenizer(folder).encode("abcde", ENOUGH)) == [256, *b"abcde"]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", None, "there is no .*tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template in .* must be a string"),
        ("chat_template.jinja", "{% if %}", "the chat template is broken: .* line 1"),
        (
            "chat_template.jinja",
            "{{ " + "{" * 200 + "x }}",
            "the chat template cannot be read: maximum recursion depth",
        ),
        ("chat_template.jinja", "{{ " + "1" * 5000 + " }}", "the chat template cannot be read: Exceeds the limit"),
    ],
)
def test_broken_files_are_named(folder, file, content, problem):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=problem):
        read_tokenizer(folder)


def test_what_is_told_of_a_tokenizer_names_no_place(folder):
    places = {"name_or_path": "/home/x", "special_tokens_map_file": "/home/y", "auto_map": {"AutoTokenizer": "/home/z"}}
    edit_config(folder, **places, bos_token={"content": "<b>"}, model_max_length=7, tokenizer_class=None)
    told = json.loads(read_tokenizer(folder).info_json)
    assert "/home" not in json.dumps(told)
    assert (told["bos_token"], told["model_max_length"]) == ("<b>", 7)


# ---- tokens that only tokenizer_config.json has, or that it has in another way ----

NEW = {"content": "<|new|>", "special": True, "normalized": False}


@pytest.fixture
def llama(folder):
    """Return the folder of a model of which transformers knows the type."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def encoded(folder, text):
    return asyncio.run(read_tokenizer(folder).encode(text, ENOUGH))


@pytest.mark.parametrize(
    ("fields", "text", "ids"),
    [
        ({"added_tokens_decoder": {str(VOCAB_SIZE): NEW}}, "a<|new|>b", [97, VOCAB_SIZE, 98]),
        (
            {"added_tokens_decoder": {"259": {"content": "<|assistant|>", "lstrip": True}}},
            "a  <|assistant|>",
            [97, 259],
        ),
        ({"added_tokens_decoder": {"97": {"content": "a", "special": True}}}, "ab", [97, 98]),
        ({"pad_token": "[PAD]"}, "a[PAD]b", [97, VOCAB_SIZE, 98]),
        ({"additional_special_tokens": ["ab", "<|eos|>"]}, "xaby", [120, VOCAB_SIZE, 121]),
        (
            {"added_tokens_decoder": {str(VOCAB_SIZE): NEW}, "pad_token": "<|new|>", "extra_special_tokens": ["cd"]},
            "cd<|new|>",
            [VOCAB_SIZE + 1, VOCAB_SIZE],
        ),
        ({"extra_special_tokens": {"image_token": "<image>"}}, "a<image>", [97, VOCAB_SIZE]),
    ],
)
@pytest.mark.parametrize(
    "their_class", few(["PreTrainedTokenizerFast", "AutoTokenizer"])
)  # importing the latter: 1.2 s
def test_texts_are_cut_at_them_as_in_transformers(llama, their_class, fields, text, ids):
    edit_config(llama, **fields)
    theirs = getattr(transformers, their_class).from_pretrained(llama)
    assert encoded(llama, text) == theirs(text)["input_ids"] == ids
    ours = read_tokenizer(llama)
    assert asyncio.run(ours.decode(ids)) == theirs.decode(ids)
    left = ours.detokenizer(skip_special_tokens=True)
    assert "".join(map(left.add, ids)) + left.flush() == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"added_tokens_decoder": {"300": NEW}},
            rf"says that the token '<\|new\|>' has id 300, and behind those of tokenizer\.json, which .* {VOCAB_SIZE}$",
        ),
        (
            {"added_tokens_decoder": {"first": NEW}},
            "added_tokens_decoder in .* must be an object of tokens by their ids",
        ),
        (
            {"added_tokens_decoder": {"9" * 5000: NEW}},
            "added_tokens_decoder in .* must be an object of tokens by their",
        ),
        ({"added_tokens_decoder": {"300": "<|new|>"}}, "300 in added_tokens_decoder .* must be an object"),
        (
            {"added_tokens_decoder": {"300": {"content": 3}}},
            "content in 300 in added_tokens_decoder .* must be a string",
        ),
        ({"additional_special_tokens": "<|new|>"}, "additional_special_tokens in .* must be a list of tokens"),
        ({"extra_special_tokens": [3]}, "extra_special_tokens in .* must be a list of tokens"),
        ({"pad_token": "\ud800"}, "tokens of tokenizer_config.json cannot be added"),
    ],
)
def test_what_cannot_be_added_is_refused(llama, fields, sentence):
    edit_config(llama, **fields)
    with pytest.raises(ModelError, match=sentence):
        read_tokenizer(llama)


def test_a_token_that_both_files_have_keeps_the_id_of_tokenizer_json(llama):
    edit_config(llama, added_tokens_decoder={"300": {"content": "<|user|>", "special": True, "normalized": False}})
    assert (
        encoded(llama, "<|user|>")
        == transformers.PreTrainedTokenizerFast.from_pretrained(llama)("<|user|>")["input_ids"]
        == [258]
    )
