"""Tokens that only tokenizer_config.json has, or that it has in another way, against transformers."""

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from coordinator.text.tokenizer import TokenLimit, read_tokenizer
from serving_core.errors import ModelError, RequestError
from tests.tiny_models import VOCAB_SIZE, write_tokenizer

ENOUGH = TokenLimit(10**9, lambda fewest: RequestError("PROMPT_TOO_LONG", f"{fewest} or more"))
NEW = {"content": "<|new|>", "special": True, "normalized": False}


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def say(folder, **fields):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


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
def test_texts_are_cut_at_them_as_in_transformers(folder, fields, text, ids):
    say(folder, **fields)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert encoded(folder, text) == theirs(text)["input_ids"] == ids
    ours = read_tokenizer(folder)
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
def test_what_cannot_be_added_is_refused(folder, fields, sentence):
    say(folder, **fields)
    with pytest.raises(ModelError, match=sentence):
        read_tokenizer(folder)


def test_a_token_that_both_files_have_keeps_the_id_of_tokenizer_json(folder):
    say(folder, added_tokens_decoder={"300": {"content": "<|user|>", "special": True, "normalized": False}})
    assert encoded(folder, "<|user|>") == AutoTokenizer.from_pretrained(folder)("<|user|>")["input_ids"] == [258]
