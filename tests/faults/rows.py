"""The rows of the matrix: what strikes, what it strikes, and what may become of requests."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults import strikes
from tests.faults.load import Habits
from tests.faults.proxy import End, Fault
from tests.faults.scene import Scene
from tests.faults.strikes import at_failpoint

USUAL = Habits()


@dataclass(frozen=True)
class Row:
    """One fault. No row may lose, double or change a token of any answer, or leave a block behind."""

    number: str  # as in F1 to F23
    fault: str
    strike: Callable[[Scene], Awaitable[None]]
    sign: str | Callable[[Scene], bool] = ""  # of its detection: words in the coordinator's log, or what tells it
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of processes, for this row
    failpoints: Mapping[str, str] = field(default_factory=dict)  # of processes
    jumping: tuple[str, ...] = ()  # processes whose wall clocks jump
    proxied: Mapping[str, Fault] = field(default_factory=dict)  # nodes behind a proxy in the data plane
    fleet_proxied: tuple[str, ...] = ()  # nodes that dial the coordinator through a proxy
    habits: Habits = USUAL
    is_patient: bool = False  # clients bear a server that is silent for long
    may_fail: tuple[str, ...] = ()  # outcomes of requests, or their status codes
    must_fail: bool = False  # some do
    must_retry: bool = False  # some begin again on other nodes
    may_retry: bool = True
    is_short: bool = False  # part of `make test`


LONG_ANSWERS = Habits(lengths=(30, 60), max_tokens=(250,))
SHORT_PROMPTS = Habits(lengths=(5, 60), max_tokens=(4, 30, 80))
CHATS = Habits(lengths=(60, 150), max_tokens=(40,), num_turns=4)
LENDS = {"coordinator": {"remote_prefix_fetch": "always"}}
LARGE = Habits(lengths=(300, 600), max_tokens=(4, 30))
TINY_POOL = {"num_kv_blocks": 64}
BOTH_DECODE = ("decode-0", "decode-1")

ROWS = (
    Row(
        "F1",
        "prefill node killed in a step",
        at_failpoint("prefill-0"),
        sign="prefill-0 lost",
        failpoints={"prefill-0": "step:40=kill"},
        must_retry=True,
    ),
    Row(
        "F2",
        "prefill node killed when some blocks are sent",
        at_failpoint("prefill-0"),
        sign="prefill-0 lost",
        failpoints={"prefill-0": "sent:20=kill"},
        must_retry=True,
    ),
    Row(
        "F2",
        "prefill node killed after a first token",
        at_failpoint("prefill-0"),
        sign="prefill-0 lost",
        failpoints={"prefill-0": "after.first_token:6=kill"},
    ),
    Row(
        "F2",
        "prefill node killed between commit and release",
        at_failpoint("prefill-0"),
        sign="prefill-0 lost",
        failpoints={"prefill-0": "release:6=kill"},
    ),
    Row(
        "F2",
        "decode node killed when blocks are granted",
        at_failpoint("decode-0"),
        sign="decode-0 lost",
        failpoints={"decode-0": "after.reserved:6=kill"},
        must_retry=True,
    ),
    Row(
        "F2",
        "decode node killed before commit",
        at_failpoint("decode-0"),
        sign="decode-0 lost",
        failpoints={"decode-0": "commit:6=kill"},
        must_retry=True,
    ),
    Row(
        "F2",
        "decode node killed after commit, untold",
        at_failpoint("decode-0"),
        sign="decode-0 lost",
        failpoints={"decode-0": "before.committed:6=kill"},
        must_retry=True,
    ),
    Row(
        "F3",
        "decode node killed while it writes",
        strikes.kill_decode,
        sign="decode-0 lost",
        must_retry=True,
        is_short=True,
    ),
    Row(
        "F3",
        "source killed as an answer is to move",
        strikes.drain_to_failpoint,
        sign="decode-0 lost",
        failpoints={"decode-0": "on.migrate:2=kill"},
        habits=LONG_ANSWERS,
        must_retry=True,
    ),
    Row(
        "F3",
        "source killed when blocks of a move are sent",
        strikes.drain_to_failpoint,
        sign="decode-0 lost",
        failpoints={"decode-0": "sent:2=kill"},
        habits=LONG_ANSWERS,
        must_retry=True,
    ),
    Row(
        "F3",
        "source killed between commit and release",
        strikes.drain_to_failpoint,
        sign="decode-0 lost",
        failpoints={"decode-0": "release:2=kill"},
        habits=LONG_ANSWERS,
    ),
    Row(
        "F3",
        "target killed before it commits a move",
        strikes.kill_target,
        sign="request not migrated",
        habits=LONG_ANSWERS,
    ),
    Row(
        "F4",
        "one rank of a node killed",
        strikes.kill_rank,
        sign="decode-0 lost",
        flags={"decode-0": {"tensor_parallel_size": 2}},
        must_retry=True,
    ),
    Row("F5", "decode node stands still for 6 s", strikes.stop("decode-0"), sign="decode-0 lost", must_retry=True),
    Row("F5", "prefill node stands still for 6 s", strikes.stop("prefill-0"), sign="prefill-0 lost"),
    Row("F5", "coordinator stands still for 6 s", strikes.stop("coordinator"), is_patient=True),
    Row(
        "F6",
        "engine stands still for 8 s, its process not",
        strikes.engine_stands_still,
        sign="decode-0 lost",
        failpoints={"decode-0": "step:60=sleep:8"},
        must_retry=True,
    ),
    Row(
        "F7",
        "data plane: cut in silence",
        strikes.proxy_strikes("decode-0"),
        sign=strikes.dialled_again("decode-0"),
        proxied={"decode-0": Fault(end=End.CUT, after_bytes=3_000_000)},
    ),
    Row(
        "F7",
        "data plane: reset in a message",
        strikes.proxy_strikes("decode-0"),
        sign=strikes.dialled_again("decode-0"),
        proxied={"decode-0": Fault(end=End.RESET, after_bytes=3_000_000, num_ends=2)},
    ),
    Row(
        "F7",
        "data plane: far (0.1 s) and slow (4 MB/s)",
        strikes.goes_on,
        proxied={name: Fault(delay_s=0.1, bytes_per_s=4e6) for name in BOTH_DECODE},
        habits=SHORT_PROMPTS,
    ),
    Row(
        "F7",
        "data plane: connections in another order",
        strikes.proxy_strikes("decode-0"),
        proxied={"decode-0": Fault(num_held=2)},
    ),
    Row(
        "F7",
        "fleet: a node's stream cut in silence",
        strikes.cut_fleet,
        sign="decode-0 lost",
        fleet_proxied=("decode-0",),
        must_retry=True,
    ),
    Row(
        "F8",
        "clients whose HTTP/2 windows stay at 0",
        strikes.stall_readers,
        sign='"request_id": "stalled-0"',
    ),
    Row(
        "F9",
        "clients that leave, in every phase",
        strikes.leave,
        failpoints={"prefill-0": "sent=sleep:0.01", "prefill-1": "sent=sleep:0.01"},
        may_fail=("CANCELLED",),
        must_fail=True,
    ),
    Row(
        "F10",
        "data plane: bits flip",
        strikes.proxy_strikes("decode-0", for_s=3.0),
        proxied={"decode-0": Fault(flip_every=40)},
        habits=LARGE,
    ),
    Row(
        "F10",
        "data plane: truncated messages",
        strikes.proxy_strikes("decode-0"),
        sign=strikes.dialled_again("decode-0"),
        proxied={"decode-0": Fault(end=End.TRUNCATED, after_bytes=3_000_000, num_ends=3)},
        habits=LARGE,
    ),
    Row(
        "F11",
        "decode pools of 512 tokens",
        strikes.goes_on,
        sign=strikes.has_preempted,
        flags=dict.fromkeys(BOTH_DECODE, TINY_POOL),
        habits=Habits(num_clients=12, lengths=(60, 150), max_tokens=(120,)),
    ),
    Row(
        "F12",
        "coordinator killed, started again",
        strikes.restart_coordinator,
        sign=strikes.clients_know,
        may_fail=("UNAVAILABLE",),
        must_fail=True,
    ),
    Row("F13", "hostile requests", strikes.ask_the_impossible, sign="request refused", may_retry=False),
    Row("F14", "garbage on every port", strikes.send_garbage, may_retry=False),
    Row("F15", "a node of another model", strikes.intrude, may_retry=False),
    Row(
        "F16",
        "wall clocks jump an hour, every second",
        strikes.goes_on,
        jumping=("coordinator", "prefill-0", "decode-0"),
        may_retry=False,
    ),
    Row("F17", "no log can be written (disk full)", strikes.fill_disk, may_retry=False),
    Row("F18", "two processes of one name", strikes.two_of_a_name, sign="decode-0 lost", must_retry=True),
    Row("F19", "a node of each role restarted in order", strikes.roll, sign="decode-0 has left", may_retry=False),
    Row(
        "F20",
        "overload: 13 times as many clients",
        strikes.overload,
        sign="WOULD_BE_LATE",
        flags={"coordinator": {"admission": "timely", "slo_class": ("default=ttft:500",)}},
        may_fail=("RESOURCE_EXHAUSTED WOULD_BE_LATE",),
        must_fail=True,
    ),
    Row(
        "F21",
        "leases end while their writer writes",
        at_failpoint("prefill-0"),
        sign="did not come within",
        flags={name: {"reservation_ttl_s": 1.0} for name in BOTH_DECODE},
        failpoints={"prefill-0": "sent:20=sleep:2"},
        must_retry=True,
    ),
    Row(
        "F22",
        "all decode nodes gone, and soon back",
        strikes.all_gone("decode", is_back=True),
        sign="decode-1 lost",
        flags={"coordinator": {"node_wait_s": 60}},
    ),
    Row(
        "F22",
        "all prefill nodes gone for longer than waits",
        strikes.all_gone("prefill", is_back=False),
        sign="NO_PREFILL_WORKER",
        flags={"coordinator": {"node_wait_s": 1}},
        may_fail=("UNAVAILABLE NO_PREFILL_WORKER",),
        must_fail=True,
    ),
    Row(
        "F23",
        "lender killed as it is to lend",
        at_failpoint("decode-0"),
        sign="decode-0 lost",
        flags=LENDS,
        failpoints={"decode-0": "on.send_prefix:3=kill"},
        habits=CHATS,
    ),
    Row(
        "F23",
        "borrower killed while it borrows",
        at_failpoint("prefill-0"),
        sign="prefill-0 lost",
        flags=LENDS,
        failpoints={"prefill-0": "after.prefix_fetch_begun:3=kill"},
        habits=CHATS,
        must_retry=True,
    ),
    Row(
        "F23",
        "lender stands still for 2 s",
        at_failpoint("decode-0"),
        flags=LENDS,
        failpoints={"decode-0": "on.send_prefix:3=sleep:2"},
        habits=CHATS,
    ),
    Row(
        "F23",
        "bits of loans flip",
        strikes.proxy_strikes("prefill-0", for_s=3.0),
        flags=LENDS,
        proxied={"prefill-0": Fault(flip_every=40)},
        habits=CHATS,
    ),
)
