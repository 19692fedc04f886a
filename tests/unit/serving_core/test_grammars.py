"""Which tokens a grammar lets come next, by the byte-level tokenizer of the tests: "a" is token 97."""

import json
import random
import re

import pytest

from coordinator.text.constraints import to_grammar
from serving_core import grammars as module
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.tiny_models import BOS, EOS, VOCAB_SIZE, write_tokenizer

A, B, C = b"abc"
SCHEMA = '{"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"], "type": "object"}'


@pytest.fixture(scope="module")
def grammars(tokenizer_folder):
    return Grammars(tokenizer_folder, (EOS,))


def guide(grammars, kind, value, whitespace=None):
    return grammars.guide(to_grammar(kind, value, whitespace))


def tokens(mask):
    return {8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def test_what_may_follow_by_hand(grammars):
    answer = guide(grammars, "regex", "ab?c")
    assert tokens(answer.allowed([])) == {A}
    assert tokens(answer.allowed([A])) == {B, C}
    assert tokens(answer.allowed([A])) == {B, C}  # asked once more
    assert tokens(answer.allowed([A, B])) == {C}
    assert tokens(answer.allowed([A, B, C])) == {EOS}


def test_an_end_token_may_come_where_the_grammar_may_end(grammars):
    answer = guide(grammars, "regex", "a*")
    assert tokens(answer.allowed([])) == {A, EOS}
    assert tokens(answer.allowed([A] * 7)) == {A, EOS}


def test_every_end_token_of_the_model_may_come(tokenizer_folder):
    answer = guide(Grammars(tokenizer_folder, (EOS, BOS)), "regex", "a")
    assert tokens(answer.allowed([A])) == {EOS, BOS}


def test_one_of_some_texts(grammars):
    odd = 'ü"\\\n'
    answer, other = (guide(grammars, "choice", ["ab", "abc", odd]) for _ in range(2))
    assert tokens(answer.allowed([])) == {A, odd.encode()[0]}
    assert tokens(answer.allowed([A, B])) == {C, EOS}
    assert tokens(other.allowed(list(odd.encode()))) == {EOS}


@pytest.mark.parametrize("text", ['start: "a" b\nb: "b"+', 'root ::= "a" b\nb ::= "b"+'])
def test_a_grammar_in_either_notation(grammars, text):
    answer = guide(grammars, "grammar", text)
    assert tokens(answer.allowed([A])) == {B}
    assert tokens(answer.allowed([A, B])) == {B, EOS}


def test_whitespace_only_where_it_is_wanted(grammars):
    begun = list(b'{"a"')
    assert tokens(guide(grammars, "json_schema", SCHEMA).allowed(begun)) == {ord(":")}
    spaced = guide(grammars, "json_schema", SCHEMA, "[ ]{1,2}")
    assert tokens(spaced.allowed(begun)) == {ord(":"), ord(" ")}
    assert tokens(spaced.allowed([*begun, *b"  "])) == {ord(":")}


def test_an_answer_that_is_taken_over_goes_on_as_it_would_have(grammars):
    rng, output = random.Random(5), []
    answer = guide(grammars, "json_schema", SCHEMA, "[ ]{1,2}")
    for _ in range(60):
        mask = answer.allowed(output)
        assert guide(grammars, "json_schema", SCHEMA, "[ ]{1,2}").allowed(output) == mask
        token = rng.choice(sorted(tokens(mask)))
        if token == EOS:
            break
        output.append(token)
    assert len(output) > 6, "hardly anything was tried"


def test_answers_of_one_grammar_have_guides_of_their_own(tokenizer_folder, grammars):
    """The grammar is compiled for the first of them alone; each goes on as one that was compiled for it would."""
    texts = [list(text) for text in (b'{"a": 12, "b": "yy"}', b'{"a":-5', b"{")]
    asked = ("json_schema", SCHEMA, "[ ]{1,2}")
    several = [guide(grammars, *asked) for _ in texts]
    alone = [guide(Grammars(tokenizer_folder, (EOS,)), *asked) for _ in texts]
    for length in range(20):
        for text, answer, other in zip(texts, several, alone, strict=True):
            assert answer.allowed(text[:length]) == other.allowed(text[:length])
    assert tokens(guide(grammars, *asked).allowed([])) == {ord("{")}


def test_a_grammar_is_compiled_once_while_it_is_in_use(tokenizer_folder, monkeypatch):
    compiled, make = [], module.LLMatcher

    def noting(tokenizer, grammar, **options):
        compiled.append(grammar)
        return make(tokenizer, grammar, **options)

    monkeypatch.setattr(module, "LLMatcher", noting)
    grammars = Grammars(tokenizer_folder, (EOS,))
    forms = [to_grammar("regex", text, None) for text in ["first", *map(str, range(module.MAX_KNOWN))]]
    for form in [forms[0], *forms[:-1], forms[0], forms[-1], forms[0], forms[1]]:
        grammars.guide(form)
    assert compiled == [*forms, forms[1]]


def test_what_has_to_come_is_not_looked_through(tmp_path):
    """Any tokens may spell it: the library would else read all of it before each token, to have it come as the
    tokenizer cuts it."""
    write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": {"260": {"content": "ab"}}})
    )
    answer = guide(Grammars(tmp_path, (EOS,)), "choice", ["abab"])
    assert tokens(answer.allowed([])) == {A, 260}


def test_a_grammar_may_take_so_much_time_a_token(grammars, monkeypatch):
    answer = guide(grammars, "regex", "a*")  # its first mask has been computed, within the limits
    monkeypatch.setattr(module, "MASKS_S", 0.0)
    monkeypatch.setattr(module, "MASK_S", 0.0)
    with pytest.raises(RequestError, match=r"the grammar has taken 0\.0 s of processor time in 1 tokens, the limit is"):
        answer.allowed([A])


def test_a_grammar_with_too_many_ways_to_read_an_answer(grammars, monkeypatch):
    monkeypatch.setattr(module, "MASKS_S", 1e6)
    answer = guide(grammars, "grammar", 'start: s\ns: s s s | s s | "a" | ""')

    def grow():
        for count in range(400):
            answer.allowed([A] * count)

    with pytest.raises(RequestError, match="max is 1000"):
        grow()


def test_a_mask_has_bits_for_the_vocabulary_alone(grammars):
    mask = guide(grammars, "regex", "(?s:.*)").allowed([])
    assert len(mask) == -(-VOCAB_SIZE // 8)
    assert max(tokens(mask)) < VOCAB_SIZE


def test_tokens_that_are_not_of_the_grammar(grammars):
    answer = guide(grammars, "regex", "ab")
    with pytest.raises(RequestError, match="does not allow of the 2 tokens so far") as error:
        answer.allowed([A, C])
    assert error.value.reason == "BAD_PARAM"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("grammar", ["{", '{"grammars": [{"lark_grammar": "start: x"}]}'])
def test_what_is_no_grammar(grammars, grammar):
    with pytest.raises(RequestError, match="the grammar cannot be compiled: ") as error:
        grammars.guide(grammar)
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


def test_tokens_that_only_the_tokenizers_config_has_may_come(tmp_path):
    write_tokenizer(tmp_path)
    added = {"260": {"content": "ab"}, "261": {"content": "<|end|>", "special": True}}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": added}))
    answer = guide(Grammars(tmp_path, (261,)), "regex", "(ab|c)c")
    assert tokens(answer.allowed([])) == {A, C, 260}
    assert tokens(answer.allowed([260])) == {C}
    assert tokens(answer.allowed([260, C])) == {261}


def test_a_grammar_for_nodes_is_for_one_vocabulary_however_texts_are_cut(tmp_path, grammars):
    given = grammars.for_nodes(to_grammar("regex", "ab?c", None))
    assert tokens(grammars.guide_of(given).allowed([A])) == {B, C}
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"]["use_regex"] = True
    path.write_text(json.dumps(tokenizer, indent=1))
    assert tokens(Grammars(tmp_path, (EOS,)).guide_of(given).allowed([A])) == {B, C}


@pytest.mark.parametrize("change", ["texts", "special"])
def test_a_grammar_for_nodes_is_refused_where_the_vocabulary_is_another(tmp_path, grammars, change):
    given = grammars.for_nodes(to_grammar("regex", "ab?c", None))
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if change == "texts":
        tokenizer["model"]["vocab"] |= {"a": B, "b": A}
    else:
        tokenizer["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(RequestError, match="the vocabularies of their tokenizers") as error:
        Grammars(tmp_path, (EOS,)).guide_of(given)
    assert error.value.reason == "PAIRING_MISMATCH"


def test_an_end_token_that_the_tokenizer_lacks_never_comes(tokenizer_folder):
    answer = guide(Grammars(tokenizer_folder, (EOS, VOCAB_SIZE + 7)), "regex", "a")
    assert tokens(answer.allowed([A])) == {EOS}


def test_a_model_without_an_end_token(tokenizer_folder):
    with pytest.raises(RequestError, match="the model has no end token"):
        Grammars(tokenizer_folder, ()).guide("start: /a/")


def test_a_model_without_a_tokenizer_that_the_library_reads(tmp_path):
    with pytest.raises(RequestError, match="does not read its tokenizer") as error:
        Grammars(tmp_path, (EOS,)).guide("start: /a/")
    assert not re.search(str(tmp_path), str(error.value))
