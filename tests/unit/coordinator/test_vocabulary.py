"""The tokenizer of the program that tries grammars has the tokens of a whole one, and refuses what that does."""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from coordinator.text.compiling import tokens_alone
from coordinator.text.constraints import to_grammar
from coordinator.text.structures import WHITESPACE
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.schemas import SCHEMAS, many_schemas
from tests.tiny_models import SPECIAL_TOKENS, write_tokenizer

REGEXES = (
    *(r"(?s:.*)", "[a-z]{1,1000}", r"\w{1,500}@\w{1,500}", "(a|b)*a(a|b){12}c", "[[:alpha:] ]+"),
    *("(a|b)*a(a|b){60}c|" * 200, "(a", "a(?=b)"),
)
GRAMMARS = (
    *('start: /(?s:.*)/ "<" /[a-z]+/', 'start: <|user|> "type" <[65]>', 'start: a\na: "type" a | a a | "x"'),
    *("start: <|nobody|>", "start: nowhere"),
)
SCHEMA_TEXTS = [json.dumps(schema) for schema in (*SCHEMAS, *many_schemas(40))]
FORMS = [
    to_grammar(kind, value, WHITESPACE)
    for kind, values in (("json_schema", SCHEMA_TEXTS), ("regex", REGEXES), ("grammar", GRAMMARS))
    for value in values
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's tokens are words too, so that a text can be made of them in several ways."""
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SCHEMA_TEXTS, trainer)
    assert tokenizer.get_vocab_size() > 500, "hardly any words"
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def both(folder):
    ends = [Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|eos|>")]
    return Grammars(folder, ends), Grammars(folder, ends, tokens_alone)


def tokens(mask):
    return [8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def test_it_has_the_same_tokens(both):
    whole, alone = (each.load() for each in both)
    assert (alone.vocab_size, alone.eos_tokens) == (whole.vocab_size, whole.eos_tokens)
    for token_id in range(whole.vocab_size):
        assert alone.decode_bytes([token_id]) == whole.decode_bytes([token_id])
        assert alone.is_special_token(token_id) == whole.is_special_token(token_id)


def test_it_takes_and_refuses_what_a_whole_one_does(both):
    answers = []
    for form in FORMS:
        errors = ["", ""]
        for index, grammars in enumerate(both):
            try:
                grammars.compiled(form)
            except RequestError as error:
                errors[index] = str(error)
        assert errors[0] == errors[1]
        answers.append(errors[0] == "")
    assert 4 <= answers.count(False) < answers.count(True)


def test_it_lets_the_same_tokens_come_where_a_text_may_go_on_in_several_ways(both):
    """Where it may not, either has the text cut in its own way."""
    rng, num_compared = random.Random(3), 0
    for form in FORMS[::3]:
        try:
            guides = [grammars.compiled(form) for grammars in both]
        except RequestError:
            continue
        output = []
        for _ in range(25):
            whole, alone = (guide.allowed(output) for guide in guides)
            if len(choices := tokens(whole)) > 1:
                assert whole == alone
                num_compared += 1
            else:
                assert len(tokens(alone)) == 1
            output.append(rng.choice(choices))
            if output[-1] in both[0].load().eos_tokens:
                break
    assert num_compared > 100


@pytest.mark.parametrize("module", ["rendering", "compiling"])
def test_what_each_api_server_runs_imports_little(module):
    code = f"import sys, coordinator.text.{module}; print(*{{'asyncio', 'google', 'grpc', 'numpy'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


MEASURING = """
import sys
from pathlib import Path
from coordinator.text import compiling
from serving_core import grammars
from serving_core.process.memory import resident_bytes
make = {"alone": compiling.tokens_alone, "whole": grammars.whole_tokenizer}[sys.argv[2]]
before = resident_bytes()
grammars.Grammars(Path(sys.argv[1]), [int(sys.argv[3])], make).load()
print(resident_bytes() - before)
"""


@pytest.mark.nightly
def test_it_takes_a_fraction_of_the_memory(tmp_path):
    write_tokenizer(tmp_path)
    path, rng = tmp_path / "tokenizer.json", random.Random(1)
    tokenizer = json.loads(path.read_text())
    vocabulary, merges, letters = tokenizer["model"]["vocab"], [], "abcdefghijklmnopqrstuvwxyz"
    words = [*letters]
    while len(words) < 60_000:
        begun, letter = rng.choice(words), rng.choice(letters)
        if begun + letter not in vocabulary:
            words.append(begun + letter)
            vocabulary[words[-1]] = len(vocabulary)
            merges.append([begun, letter])
    path.write_text(json.dumps({**tokenizer, "model": {**tokenizer["model"], "merges": merges}}))

    def taken(which):
        command = [sys.executable, "-c", MEASURING, str(tmp_path), which, str(len(vocabulary) + 1)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert taken("alone") < taken("whole") / 2
