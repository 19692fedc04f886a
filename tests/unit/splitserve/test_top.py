"""`splitserve top`: what it shows of a server whose figures the test writes, in 80 columns, and how it ends."""

import io
import os
import pty
import re
import select
import signal
import sys
import termios
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from protos import inference_pb2
from splitserve.cli import main
from splitserve.client.overview import to_overview
from splitserve.commands.overview_view import OverviewView, bars, milliseconds, short
from tests import forked
from tests.scripted_server import Script, serving

DEADLINE_S = 240.0
PRESSED_AGAIN_S = 60.0  # by whoever sees nothing come of it: an exception may be lost in a library
COLUMNS = 80


def percentiles(p50, p90, p99):
    return inference_pb2.Percentiles(p50=p50, p90=p90, p99=p99)


def node(name, role, *, state="ready", slots=0, reads=0, free=60, **fields):
    load = inference_pb2.NodeLoad(
        name=name, role=role, state=state, num_blocks=100, num_blocks_free=free, num_prompt_tokens=1000,
        num_cached_tokens=250, step_s=0.0123, shape=inference_pb2.Shape(prompt_tokens=reads, slots=slots),
    )  # fmt: skip
    return inference_pb2.NodeOverview(load=load, **fields)


OVERVIEW = inference_pb2.Overview(
    uptime_s=200.0,
    served_model_name="some-model",
    nodes=[
        node("decode-0", "decode", slots=64, free=5, num_sequences=12, num_incoming=3, tokens_per_s=345.6),
        node("decode-1", "decode", slots=64, state="draining"),
        node("prefill-0", "prefill", reads=512, num_tokens_to_compute=12_345, prompt_tokens_per_s=123_456.0),
    ],
    phases=[
        inference_pb2.PhaseCount(phase=phase, num_sequences=number)
        for phase, number in (
            ("prefill_queue", 2), ("prefill", 1), ("kv_alloc", 0), ("kv_transfer", 1), ("decode_queue", 0),
            ("decode", 1000), ("no_node", 0),
        )
    ],
    rates=inference_pb2.Rates(tokens_per_s=345.6, prompt_tokens_per_s=123_456.0, requests_per_s=3.4),
    recent_tokens_per_s=[0.0] * 20 + [100.0] * 15 + [400.0],
    window_s=60.0,
    times=[
        inference_pb2.TimesOverview(
            num_sequences=1012, num_limited=8, num_met=6, ttft_s=percentiles(0.123, 0.456, 12.345),
            tpot_s=percentiles(0.0123, 0.0456, 0.1234),
        ),
        inference_pb2.TimesOverview(
            slo_class="chat", limits="ttft:500,tpot:40", num_sequences=8, num_limited=8, num_met=6
        ),
    ],
)  # fmt: skip


class Watched(Script):
    def GetOverview(self, request, context):
        self._note(request, context)
        return OVERVIEW


@pytest.fixture
def script():
    return Watched()


@pytest.fixture
def target(script):
    with serving(script) as target:
        yield target


def rows(text):
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}


def test_a_frame_tells_of_nodes_phases_rates_and_times(script, target):
    result = CliRunner().invoke(main, ["top", "--once", "--server", target])
    assert result.exit_code == 0, result.output
    shown = rows(result.stdout)
    assert result.stdout.splitlines()[0] == "some-model · 3 nodes · up 3 min 20 s"
    [phases] = [line for line in result.stdout.splitlines() if line.startswith("live")]
    assert re.split(" {2,}", phases.rstrip()) == ["live", "prefill queue", "prefill", "alloc", "transfer",
                                                  "decode queue", "decode", "node wait"]  # fmt: skip
    assert shown["last"][-2:] == ["attained", "SLO"]
    assert shown["1004"] == ["2", "1", "0", "1", "0", "1000", "0"]
    assert "tokens/s: 346 generation, 123k prompt · 3.4 requests/s" in result.stdout
    assert shown["all"] == ["1012", "123/456/12345", "12/46/123", "75%"]
    assert shown["chat"] == ["8", "-", "-", "75%", "ttft:500,tpot:40"]
    assert shown["decode-0"] == ["decode", "-", "0", "12/64", "3", "95%", "25%", "0", "346", "12"]
    assert shown["decode-1"][0] == "draining"
    assert shown["prefill-0"] == ["prefill", "512", "12.3k", "-", "0", "40%", "25%", "123k", "0", "12"]
    assert [request.HasField("after") for request in script.requests] == [False]  # no request history


def shown(overview, columns=COLUMNS):
    written = io.StringIO()
    Console(file=written, width=columns, force_terminal=False).print(OverviewView(to_overview(overview)))
    return written.getvalue()


def test_a_frame_fits_into_80_columns():
    frame = shown(OVERVIEW)
    lines = [line.rstrip() for line in frame.splitlines()]
    assert max(map(len, lines)) <= COLUMNS
    assert "…" not in frame
    assert len(lines) == 15


def node_rows(overview, columns):
    return [line.split() for line in shown(overview, columns).splitlines()[-len(overview.nodes) :]]


@pytest.mark.parametrize(("columns", "num_shown"), [(COLUMNS, 6), (100, 31)])
def test_long_names_are_told_apart_and_take_no_room_from_figures(columns, num_shown):
    """As those of pods are."""
    overview = inference_pb2.Overview()
    overview.CopyFrom(OVERVIEW)
    names = [f"splitserve-node-7d9c6b8f5-{end}" for end in ("k9w4d", "x2lqz", "zz9p8")]
    for each, name in zip(overview.nodes, names, strict=True):
        each.load.name = name
    rows = node_rows(overview, columns)
    assert [row[0][-num_shown:] for row in rows] == [name[-num_shown:] for name in names]
    assert [row[1:] for row in rows] == [row[1:] for row in node_rows(OVERVIEW, columns)]


def test_a_cluster_without_nodes_and_answers_has_a_frame_too(script, target, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "OVERVIEW", inference_pb2.Overview(served_model_name="m", window_s=60))
    result = CliRunner().invoke(main, ["top", "--once", "--server", target])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no node is attached")


class Terminal:
    """`splitserve top` in a terminal of its own, with so many lines."""

    def __init__(self, target, lines):
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        command = ("splitserve", "top", "--every", "0.1", "--server", target)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(lines)}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        self.process = forked.popen(*command, env=environment, start_new_session=True, **ends)

    def read_until(self, text, times=1):
        """What is written from now on until it has the text so often."""
        written, give_up_at = b"", time.monotonic() + DEADLINE_S
        while written.count(text) < times:
            assert time.monotonic() < give_up_at, written
            assert select.select([self.master], [], [], DEADLINE_S)[0], written
            written += os.read(self.master, 2**16)
        return written

    def press(self, key):
        if key == b"\x03":
            self.process.send_signal(signal.SIGINT)
        else:
            os.write(self.master, key)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(script, target):
    terminals = []

    def start(lines=24):
        terminals.append(Terminal(target, lines))
        return terminals[-1]

    yield start
    for each in terminals:
        each.close()


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_it_goes_on_until_a_key_and_leaves_the_terminal_as_it_was(terminal, key):
    top = terminal()
    top.read_until(b"decode-0", 3)
    pressed_at, give_up_at = None, time.monotonic() + DEADLINE_S
    while top.process.poll() is None:  # what it still writes has to be read
        assert time.monotonic() < give_up_at
        if pressed_at is None or time.monotonic() > pressed_at + PRESSED_AGAIN_S:
            top.press(key)
            pressed_at = time.monotonic()
        if select.select([top.master], [], [], 0.1)[0]:
            os.read(top.master, 2**16)
    assert top.process.returncode in ((0,) if key == b"q" else (130, -signal.SIGINT))
    assert termios.tcgetattr(top.slave) == top.before


def test_a_screen_that_is_too_low_for_all_nodes_tells_of_the_others_and_scrolls(terminal):
    top = terminal(lines=14)  # 12 without nodes
    for key, first, others in (
        (b"", b"decode-0", (b"decode-1", b"prefill-0")),
        (b"\x1b[B", b"decode-1", (b"decode-0", b"prefill-0")),
        (b"\x1b[6~", b"prefill-0", (b"decode-0", b"decode-1")),
        (b"\x1b[A", b"decode-1", (b"decode-0", b"prefill-0")),  # where it has gone no further than the last one
    ):
        number = {b"decode-0": 1, b"decode-1": 2, b"prefill-0": 3}[first]
        top.press(key)
        line = b"%d to %d of 3 nodes" % (number, number)
        top.read_until(line)
        frame = top.read_until(line)
        assert (first in frame, *(other in frame for other in others)) == (True, False, False)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (0.25, "0.2"), (9.5, "9.5"), (12.3, "12"), (999.4, "999"), (999.6, "1k"), (1234, "1.23k"), (5e6, "5M")],
)
def test_numbers_are_short(number, shown):
    assert short(number) == shown


def test_times_and_bars():
    assert [milliseconds(seconds) for seconds in (0.0001, 0.00994, 0.00996, 1.5)] == ["0.1", "9.9", "10", "1500"]
    assert bars([0, 1, 4, 8]) == "▁▂▅█"
    assert bars([0, 0]) == bars([]) == ""
