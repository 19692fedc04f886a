"""Score requests: which prompts they take, and what becomes of the logprobs of single tokens."""

import asyncio
import struct

import pytest

from coordinator.api import messages, scoring
from coordinator.api.prompts import question_of
from coordinator.api.scoring import Item, check_items, check_reply_begins, next_tokens, plan_scores, response_of
from coordinator.api.validation import Limits
from coordinator.control.load import Prompt
from coordinator.control.request import NOTHING
from coordinator.text.tokenizer import read_tokenizer
from protos.inference_pb2 import ChatInput, ChatMessage, Complete, ScoreItem, ScoreRequest, Timeline
from serving_core.errors import RequestError
from tests.tiny_models import write_tokenizer

LIMITS = Limits(
    served_model_names=("m",),
    vocab_size=260,
    max_model_len=100,
    max_logprobs=20,
    prefill_pool_tokens=None,
    decode_pool_tokens=None,
    min_output_tokens=0,
)
BEGINNINGS = "with the beginnings of their labels"
YES_NO = Item((5, 6), [(1,), (2,)])
LONG = Item((7,), [(1, 2), (1, 3, 4), (2,)])  # two labels begin alike


def plan(items, prompt=(9, 9), limits=LIMITS, max_sequences=100):
    return plan_scores(ScoreRequest(request_id="r"), list(prompt), items, limits, max_sequences)


def complete(*logprobs, prompt_tokens=4, cached_tokens=0, e2e_s=1.0):
    told = struct.pack(f"<{len(logprobs)}f", *logprobs)
    timeline = Timeline(e2e_s=e2e_s)
    return Complete(embedding=told, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, timeline=timeline)


def test_a_label_of_several_tokens_takes_a_prompt_for_each_of_its_beginnings():
    assert next_tokens(YES_NO) == {(): (1, 2)}
    assert next_tokens(LONG) == {(): (1, 2), (1,): (2, 3), (1, 3): (4,)}
    made = plan([YES_NO, LONG])
    assert made.prompt == [9, 9]
    assert made.endings == ((5, 6), (7,), (7, 1), (7, 1, 3))
    assert [each.logprob_token_ids for each in made.samplings] == [(1, 2), (1, 2), (2, 3), (4,)]
    assert made.num_prompt_tokens == 2 + 2 + 1 + 2 + 3


def test_its_logprob_is_the_sum_of_those_of_its_tokens():
    items = [YES_NO, LONG]
    results = [
        complete(-0.25, -1.5),
        complete(-0.5, -1.0, e2e_s=3.0),
        complete(-2.0, -0.125, prompt_tokens=5),
        complete(-4.0, prompt_tokens=6, cached_tokens=4),
    ]
    response = response_of("r", plan(items), items, results)
    assert [list(item.logprobs) for item in response.items] == [[-0.25, -1.5], [-2.5, -0.5 - 0.125 - 4.0, -1.0]]
    assert response.timeline.e2e_s == 3.0


def test_cached_tokens_are_those_that_nobody_computed():
    items = [YES_NO, YES_NO]
    results = [complete(-1.0, -1.0), complete(-1.0, -1.0, cached_tokens=3)]
    response = response_of("r", plan(items), items, results)
    assert (response.prompt_tokens, response.cached_tokens) == (2 + 2 + 2, 6 - 4 - 1)
    response = response_of("r", plan(items), items, [complete(-1.0, -1.0)] * 2)  # the input twice
    assert response.cached_tokens == 0


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        ([YES_NO] * 101, {}, f"items take at least 101 prompts {BEGINNINGS}, the limit is 100 in flight"),
        ([Item((5,) * 99, [(1,)])], {}, "the prompt has 101 tokens, over max_model_len (100)"),
        ([Item((260,), [(1,)])], {}, "items has token id 260; the vocabulary ends at 259"),
        ([Item((1,), [(1, 260)])], {}, "items has token id 260; the vocabulary ends at 259"),
        ([Item((), [(1,)])], {"prompt": ()}, "input is empty: a prompt needs at least one token"),
    ],
)
def test_a_plan_is_within_the_limits(items, options, message):
    with pytest.raises(RequestError) as caught:
        plan(items, **options)
    assert str(caught.value) == message


def test_all_prompts_together_have_a_limit(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_PROMPT_TOKENS", 7)
    with pytest.raises(RequestError, match="items take 2 prompts of 8 tokens in all, the limit is 7: send fewer"):
        plan([YES_NO] * 2)


def test_the_wire_to_the_coordinator_keeps_a_plan():
    made = plan([YES_NO, LONG])
    wire = messages.call_to_wire("1", made, question_of(ScoreRequest(request_id="r")), [NOTHING] * 4)
    read, so_fars = messages.plan_from_wire(wire)
    assert (read, so_fars) == (made, [NOTHING] * 4)


def test_blocks_of_a_shared_beginning_have_the_hashes_that_they_have_alone():
    beginning = Prompt(range(10), "salt", "adapter")
    for ending in ((), (50,), (50, 51, 52, 53, 54)):
        whole = Prompt([*range(10), *ending], "salt", "adapter")
        assert beginning.followed_by(ending).block_hashes(4) == whole.block_hashes(4)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "items is empty: at least one is needed"),
        ([ScoreItem(text="a", labels=["b"])] * 1025, "items has 1025 entries, the limit is 1024"),
        ([ScoreItem(text="a")], "items[0].labels is empty: at least one is needed"),
        ([ScoreItem(labels=["b"] * 256)], "items[0].labels has 256 entries, the limit is 255"),
        ([ScoreItem(labels=["b", "c", "b"])], "items[0].labels has the same text twice"),
        ([ScoreItem(labels=["a", ""])], "items[0].labels must have 1 to 64 characters each, not 0"),
        ([ScoreItem(labels=["a" * 65])], "items[0].labels must have 1 to 64 characters each, not 65"),
    ],
)
def test_items_and_labels_have_limits(items, message):
    with pytest.raises(RequestError) as caught:
        check_items(ScoreRequest(items=items))
    assert str(caught.value) == message


# ---- tokens ----


def tokenized(folder, request, template=""):
    write_tokenizer(folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return asyncio.run(scoring.tokenize_items(read_tokenizer(folder), request, LIMITS, "think"))


@pytest.mark.usefixtures("programs_here")
def test_an_item_ends_the_last_message_whatever_the_others_are(tmp_path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<end>"
    chat = ChatInput(
        messages=[ChatMessage(role="user", content="hi: "), ChatMessage(role="user", content_parts=["a", "b "])]
    )
    items = [ScoreItem(text="one?", labels=["yes", "no"]), ScoreItem(text="x ", labels=["A"])]
    prompt, found = tokenized(tmp_path, ScoreRequest(chat=chat, items=items), template)
    assert bytes(prompt) == b"<user>hi:<user>a\nb "
    assert [bytes(each.ending) for each in found] == [b"one?<end>", b"x <end>"]
    assert [[bytes(label) for label in each.labels] for each in found] == [[b"yes", b"no"], [b"A"]]
    again, [alone] = tokenized(tmp_path, ScoreRequest(chat=chat, items=items[:1]), template)
    assert (again, alone) == (prompt, found[0])


def test_without_a_chat_an_item_ends_the_text(tmp_path):
    items = [ScoreItem(text=" is", labels=[" a"])]
    prompt, [item] = tokenized(tmp_path, ScoreRequest(text="this", items=items))
    assert (bytes(prompt), bytes(item.ending), bytes(item.labels[0])) == (b"this", b" is", b" a")


@pytest.mark.usefixtures("programs_here")
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", "writes the last message 0 times"),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", "writes the last message 2 times"),
        ("{{ messages[-1].content }}<think>\n", "chat ends in the model's thoughts"),
    ],
)
def test_a_template_must_let_a_label_follow_the_item(tmp_path, template, message):
    chat = ChatInput(messages=[ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")])
    request = ScoreRequest(chat=chat, items=[ScoreItem(text="i", labels=["a"])])
    with pytest.raises(RequestError, match=message):
        tokenized(tmp_path, request, template)


def test_models_whose_replies_begin_with_markup_have_no_labels():
    check_reply_begins("<|im_start|>assistant\n", "think")
    with pytest.raises(RequestError, match=r"replies of the model begin with markup \(openai_gptoss\)"):
        check_reply_begins("<|start|>assistant", "openai_gptoss")


class Merging:
    """A tokenizer whose tokens are words."""

    def __init__(self):
        self.words = {}

    async def encode(self, text, limit, *, add_special_tokens=True):
        return [self.words.setdefault(word, len(self.words)) for word in text.replace("no", "NO").split(" ")]

    num_end_tokens = 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["b"], "has 'b', which becomes one token with the end of the prompt"),
        ([" no", " NO"], "has two texts of the same tokens"),
    ],
)
def test_a_label_has_tokens_of_its_own(labels, message):
    request = ScoreRequest(text="t", items=[ScoreItem(text="x a", labels=labels)])
    with pytest.raises(RequestError) as caught:
        asyncio.run(scoring.tokenize_items(Merging(), request, LIMITS, "think"))
    assert str(caught.value) == f"items[0].labels {message}"
