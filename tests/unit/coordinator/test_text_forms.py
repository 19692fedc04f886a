"""What regular expressions and formats let come, beside Python's and what the RFCs say."""

import asyncio
import itertools
import json
import re

import pytest

from coordinator.text.patterns import with_ascii_classes
from coordinator.text.structures import Structures
from protos.inference_pb2 import SamplingParams
from serving_core.grammars import Grammars
from tests.tiny_models import EOS
from tests.unit.coordinator.grammar_kit import may_be as is_let


@pytest.fixture(scope="module")
def may_be(tokenizer_folder):
    structures, grammars = Structures(tokenizer_folder, (EOS,)), Grammars(tokenizer_folder, (EOS,))

    def check(text, **params):
        """Whether this may be a whole answer."""
        return is_let(grammars.guide_of(asyncio.run(structures.grammar(SamplingParams(**params)))), text)

    return check


CLASSES = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[\d-]", r"[^\w]", r"[^\s\d]", r"[\W_]", r"[\D\d]", r"[]\d]"]
CLASSES += [r"[^]\w]", r"[\w.-]", r"[.\-\s]", r"\\d", r"(\d)", r"(?:\w|\s)", r"[\\d]", r"(?P<n>\d)", r"[(?u:]|\d"]
CHARS = "0a_Z- .d\\\n\t(u:?]é٣߀ªß\u00a0\u2003\u3000日"


def as_python_has_it(pattern):
    return re.compile(pattern, re.ASCII)


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_are_those_of_ascii(may_be, pattern):
    for char in CHARS if pattern != r"\\d" else [*CHARS, r"\d"]:
        is_right = as_python_has_it(pattern).fullmatch(char) is not None
        assert may_be(char, regex=pattern) == is_right, char
        schema = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
        assert may_be(json.dumps(char, ensure_ascii=False), json_schema=schema) == is_right, char
        named = {"type": "object", "patternProperties": {f"^(?:{pattern})$": {}}, "additionalProperties": False}
        text = json.dumps({char: 1}, ensure_ascii=False)
        assert may_be(text, json_schema=json.dumps(named)) == is_right, char


@pytest.mark.parametrize("pattern", [r"[!-\d]", r"[!\w-\d]", r"[!-\w\s]"])
def test_a_class_ends_no_range_and_the_hyphen_before_it_is_a_member(may_be, pattern):
    as_told = as_python_has_it(pattern.replace("-", r"\-"))  # as in ECMA 262, and to Python itself an error
    for char in CHARS + "!#[]5":
        assert may_be(char, regex=pattern) == (as_told.fullmatch(char) is not None), char


@pytest.mark.parametrize(
    ("pattern", "unicode"),
    [(r"(?u:\d)", r"\d"), (r"(?u)\w", r"\w"), (r"(?u:\s)|\d", r"\s|[0-9]"), (r"((?u)\w)|\s", r"\w|[\t-\r ]")],
)
def test_who_asks_for_unicode_gets_it(may_be, pattern, unicode):
    for char in CHARS:
        assert may_be(char, regex=pattern) == (re.fullmatch(unicode, char) is not None), char


def test_a_group_that_ends_takes_what_it_asked_for_along():
    assert with_ascii_classes(r"(?u:(a\d))\d(?-u:\d)(?ui)\d(?-u)\d)") == r"(?u:(a\d))[0-9](?-u:[0-9])(?ui)\d(?-u)[0-9])"


def is_host(text):
    """By RFC 1123, and of RFC 5890's labels with hyphens as third and fourth none."""
    labels = text.split(".")
    is_label = [re.fullmatch("[A-Za-z0-9-]{1,63}", each) and each[0] != "-" != each[-1] for each in labels]
    return len(text) <= 253 and all(is_label) and not any(each[2:4] == "--" for each in labels)


HOSTS = [".".join(each) for each in itertools.product(["a", "-a", "a-", "a-b", "1a", "xn--ls8h", "a--b"], repeat=2)]
HOSTS += ["", "a", "ab", "abc", "ab--", "ab-c", "abcd", "a.", ".a", "a..b", "a_b", "é.fr", "xn--X", "aa--a", "ab---c"]
HOSTS += ["a" * 63, "a" * 64, f"b.{'a' * 64}", *(".".join(["a" * 63] * 3 + ["b" * last]) for last in (61, 62))]
HOSTS += ["a." * 126 + "a", "a." * 126 + "aa", f"{'-'.join('a' * 32)}.{'-'.join('b' * 32)}", "٣.fr"]


def test_names_of_hosts_are_those_of_the_rfcs(may_be):
    for host in HOSTS:
        schema = json.dumps({"type": "string", "format": "hostname"})
        assert may_be(json.dumps(host, ensure_ascii=False), json_schema=schema) == is_host(host), host


def test_a_host_keeps_to_what_else_is_asked(may_be):
    schema = json.dumps({"type": "string", "format": "hostname", "pattern": r"\.fr$", "maxLength": 5, "minLength": 4})
    for host, is_right in (("a.fr", True), ("ab.fr", True), ("abc.fr", False), ("a.de", False), (".fr", False)):
        assert may_be(json.dumps(host), json_schema=schema) == is_right


MAILBOXES = [  # beside whether they are some by RFC 5321
    *(("a@b", True), ("a.b+c@d-e.fr", True), ("a@[127.0.0.1]", True), ("x_y'z@a.b", True)),
    *(("a", False), ("@b", False), ("a@", False), ("a..b@c", False), (".a@b", False), ("a b@c", False)),
    ("a@b@c", False),
    *(("a@-b", False), ("a@xn--b", False), ("a@[256.0.0.1]", False), (f"a@{'b' * 64}.c", False)),
    *((f"{'a' * 64}@b", True), (f"{'a' * 65}@b", False)),
    (f"{'a' * 60}@{'.'.join(['b' * 63] * 3)}.c", True),
    (f"{'a' * 64}@{'.'.join(['b' * 62] * 3)}", True),
    (f"{'a' * 64}@{'.'.join(['b' * 63] * 3)}", False),
]


def test_mailboxes_are_those_of_the_rfcs(may_be):
    for text, is_right in MAILBOXES:
        schema = json.dumps({"type": "string", "format": "email"})
        assert may_be(json.dumps(text), json_schema=schema) == (is_right and len(text) <= 254), text
