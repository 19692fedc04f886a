"""`splitserve doctor --check-bits`: what is asked, what counts as a difference, and what is said of it."""

import io
import struct

import pytest
from click.testing import CliRunner
from rich.console import Console

from splitserve.cli import main
from splitserve.client.answers import Completion, NodeInfo, Timeline, TokenLogprob, TopLogprob
from splitserve_bench.bits import (
    BitsBench,
    BitsFigures,
    Difference,
    Output,
    Played,
    bits_view,
    conclusion,
    draw_requests,
    first_difference,
    promise_of,
)
from splitserve_bench.errors import BenchError
from tests.tiny_models import write_fake_model

SIZES = BitsBench(8, (5, 100, 30), (8, 20))
COMPLETION = Completion("length", None, 5, 2, 0, Timeline(*[0.0] * 8, "p", "d", 0, 0, 0.0), 0, 0, 0)


def output(*tokens, logprob=-1.0, top=-2.0):
    logprobs = tuple(TokenLogprob(token, logprob, (TopLogprob(7, top),)) for token in tokens)
    return Output(tokens, logprobs, COMPLETION)


def next_float(number):
    """The next float of 32 bits away from 0."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return struct.unpack("<f", struct.pack("<I", bits + 1))[0]


def test_equal_outputs_do_not_differ():
    assert first_difference([output(1, 2), output(3)], [output(1, 2), output(3)]) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([output(1, 2), output(3, 9)], Difference(1, 1, is_token=True)),
        ([output(1, 2), output(3, 4, logprob=next_float(-1.0))], Difference(1, 0, is_token=False)),
        ([output(1, 2, top=next_float(-2.0)), output(3, 9)], Difference(0, 0, is_token=False)),
        ([output(1, 2), output(3)], Difference(1, 1, is_token=True)),
        ([output(1, 2, 5), output(3, 4)], Difference(0, 2, is_token=True)),
    ],
)
def test_the_first_difference_is_found_down_to_the_last_bit(found, expected):
    assert first_difference([output(1, 2), output(3, 4)], found) == expected


def test_requests_are_the_same_each_time_half_greedy_and_half_sampled():
    requests = draw_requests(SIZES, 260, 1024)
    assert requests == draw_requests(SIZES, 260, 1024)
    assert [len(request.prompt) for request in requests] == [5, 100, 30, 5, 100, 30, 5, 100]
    assert sum(request.sampling["temperature"] == 0 for request in requests) == 4
    assert len({request.seed for request in requests}) == 1 + 4
    assert all(8 <= request.max_tokens <= 20 for request in requests)
    assert all(0 <= token < 260 for request in requests for token in request.prompt)


def test_prompts_that_the_context_does_not_hold_are_left_out():
    assert {len(request.prompt) for request in draw_requests(SIZES, 260, 100)} == {5, 30}
    with pytest.raises(BenchError, match="a context of 60 tokens is too short"):
        draw_requests(SIZES, 260, 60)


WHATEVER = "whatever happened to an output"


def node(*, is_batch_invariant="no", batch_invariant="no", tp_size="1", kv_cache_dtype="bfloat16", **numerics):
    engine = {"batch_invariant": batch_invariant, "tp_size": tp_size}
    return NodeInfo(
        "n",
        "mixed",
        "1",
        {"kv_cache_dtype": kv_cache_dtype},
        engine,
        {"is_batch_invariant": is_batch_invariant, **numerics},
        "0.1.0",
    )


@pytest.mark.parametrize(
    ("described", "promise"),
    [
        (node(is_batch_invariant="yes"), "promised: the same bits whatever happened to an output"),
        (
            node(is_batch_invariant="yes", threads="2"),
            f"promised: the same bits {WHATEVER} (with equal numbers of threads)",
        ),
        (node(kv_cache_dtype="int8"), "not promised: keys and values in 8 bits"),
        (node(tp_size="4"), "not promised: the order in which 4 ranks"),
        (node(batch_invariant="yes"), "not promised: histories that the node tried out"),
        (node(), "not promised without --batch-invariant"),
    ],
)
def test_what_is_promised(described, promise):
    assert promise_of(described).startswith(promise)


GOOD = Played("crowd", "7 outputs at the same time", True, None)
MISSED = Played("migrated", "0 moves", False, None)
BAD = Played("chunks of 16", "3 prompts cut", True, Difference(2, 17, is_token=False))


@pytest.mark.parametrize(
    ("histories", "said", "differs"),
    [
        ((GOOD,), "none of 1 histories changed a bit of a token or a log-probability", False),
        ((GOOD, MISSED), "no history changed a bit, but of 2 some could not be played: migrated", False),
        ((GOOD, MISSED, BAD), "1 of 3 histories changed bits of outputs: chunks of 16", True),
    ],
)
def test_the_conclusion(histories, said, differs):
    figures = BitsFigures("m", {}, "promised", histories)
    assert (conclusion(figures), figures.differs) == (said, differs)


def test_the_view_has_a_line_for_each_history():
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(bits_view(BitsFigures("m", {"device": "cpu"}, "promised: bits", (GOOD, MISSED, BAD))))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[:2] == ["m: device cpu", "promised: bits"]
    assert "crowd ok 7 outputs at the same time" in lines
    assert "migrated not played 0 moves" in lines
    assert "chunks of 16 differ: request 2, log-probabilities 17 3 prompts cut" in lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--check-bits", "--save", "profile.json"], "--check-bits measures nothing that --save could write"),
        (["--tp", "2"], "--tp is for --check-bits"),
    ],
)
def test_what_does_not_go_together(tmp_path, flags, message):
    result = CliRunner().invoke(main, ["doctor", str(write_fake_model(tmp_path)), *flags])
    assert result.exit_code == 2
    assert message in result.stderr
