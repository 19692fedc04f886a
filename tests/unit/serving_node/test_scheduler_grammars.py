"""A request with a grammar waits until that is compiled; nothing else does."""

import pytest

from serving_core.errors import RequestError
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import Node, prompt_of

GUIDE = object()


def test_a_prompt_waits_for_its_grammar_and_others_do_not():
    node = Node()
    node.local("structured", 6, grammar="g")
    node.local("plain", 6)
    assert node.begin() == [("plain", 0, 6)]
    node.compiled(GUIDE)
    node.end()
    assert ("structured", 0, 6) in node.begin()
    assert next(work.request for work in node.works if work.request.request_id == "structured").guide is GUIDE
    node.end()
    node.steps()
    assert node.tokens("structured") == node.tokens("plain") == answer_of(prompt_of(6), 4)
    node.check_empty()


def test_a_request_from_another_node_gets_no_credit_before():
    node = Node()
    request = node.reserve("a", 6, grammar="g")
    node.begun(request)
    assert not node.opened
    node.compiled(GUIDE)
    node.arrive(request)
    node.steps()
    assert node.words("a") == ["reserved", "committed", *["step_tokens"] * 3]
    node.check_empty()


def test_a_descriptor_that_comes_before_is_kept():
    node = Node()
    request = node.prefill("a", 6, grammar="g")
    node.deliver(request, b"descriptor")
    assert not node.begin()
    node.compiled(GUIDE)
    node.steps()
    assert node.sending[request.epoch].descriptor == b"descriptor"
    node.sent(request)
    node.check_empty()


@pytest.mark.parametrize("kind", ["prefill", "reserve", "local"])
def test_a_cancel_waits_for_no_compiler(kind):
    node = Node()
    request = getattr(node, kind)("a", 6, grammar="g")
    node.cancel(request)
    assert node.words("a") == ["cancelled"]
    node.check_empty()
    node.compiled(GUIDE)
    node.compiling.append(request)
    node.compiled(RequestError("BAD_PARAM", "no grammar"))
    assert node.words("a") == ["cancelled"]
    assert not node.begin()


def test_nobody_waits_after_the_coordinator_is_lost():
    node = Node()
    node.local("a", 6, grammar="g")
    node.detached()
    node.check_empty()
    node.compiled(GUIDE)
    assert not node.begin()


def test_a_request_whose_grammar_does_not_compile_fails():
    node = Node()
    node.local("a", 6, grammar="g")
    node.compiled(RequestError("BAD_PARAM", "no grammar"))
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == ("BAD_PARAM", "no grammar")
    node.check_empty()


def test_nobody_is_preempted_for_a_prompt_that_waits_for_its_grammar():
    node = Node(num_blocks=4, caching=False)
    young = node.has_read("young", 8, age=2)
    node.local("old", 8, age=1, grammar="g")
    assert not node.begin()
    assert node.scheduler.node_requests.find(young).num_evictions == 0
    node.compiled(GUIDE)
    node.steps()
    assert node.scheduler.node_requests.find(young).num_evictions == 1
    assert len(node.tokens("old")) == 4
