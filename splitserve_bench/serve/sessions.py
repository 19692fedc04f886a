"""Make the sessions of a load: several turns of one conversation, drawn from distributions or read from a file.

A file is one of these; lengths are in tokens, delays in ms before a turn:

    JSON list     conversations of `vllm bench`'s multi-turn benchmark: {"id", "messages": [{"role", "content"}, ...]}
    JSON lines    a session a line, as AIPerf's: {"session_id", "turns": [{"text" or "input_length", "output_length",
                  "delay"}, ...]}; or a turn a line, with "session_id" in it
    JSON lines    a Mooncake trace, without session ids: a request whose hash ids go on where those of an earlier one
                  end is the next turn of its session

The prompt of a turn is what it adds to the conversation. The output before it is what the server has sent, not what the
file says of it.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from coordinator.control.slo import MS
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.datasets import (
    Shape,
    TracedRequest,
    fit,
    json_rows,
    ordinary_ids,
    parsed,
    read_mooncake_trace,
    token_count,
    trace_load,
)
from splitserve_bench.serve.drawn import Drawn
from splitserve_bench.serve.records import PlannedRequest

MAX_TURNS: Final = 10_000  # of one session
CHAT_TOKENS: Final = 32  # that a chat template may put around a message


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to its conversation, how long its output is, and the seconds before it."""

    prompt: tuple[int, ...]
    output_tokens: int
    gap_s: float = 0.0
    text: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the tokens that the turn adds, its output included."""
        return len(self.prompt) + self.output_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one session. The sub-agents continue its first turn at once, and its second waits for them."""

    turns: tuple[Turn, ...]
    agents: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionShape:
    """The distributions of drawn sessions; see the flags of `bench serve`."""

    num_turns: Drawn
    input_len: Drawn  # of the first turn, beside the shared prefix
    turn_input_len: Drawn
    output_len: Drawn
    think_time_s: Drawn
    prefix_len: int = 0
    num_agents: int = 0
    agent_prefix_len: int = 0


def drawn_sessions(count: int, shape: SessionShape, vocab_size: int, rng: Random) -> list[Conversation]:
    """Return `count` sessions with random tokens; all begin with the same `prefix_len` tokens."""
    ids = ordinary_ids(vocab_size)

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(rng.choices(ids, k=num))

    def turn(length: Drawn, before: tuple[int, ...] = (), gap_s: float = 0.0) -> Turn:
        return Turn((*before, *tokens(length.count(rng))), shape.output_len.count(rng), gap_s)

    prefix, sessions = tokens(shape.prefix_len), []
    for _ in range(count):
        num_turns = min(MAX_TURNS, shape.num_turns.count(rng))
        turns = [turn(shape.input_len, prefix)]
        turns += [turn(shape.turn_input_len, gap_s=shape.think_time_s.draw(rng)) for _ in range(num_turns - 1)]
        common = tokens(shape.agent_prefix_len)
        agents = [turn(shape.turn_input_len, common) for _ in range(shape.num_agents)]
        sessions.append(Conversation(tuple(turns), tuple(agents)))
    return sessions


def planned_sessions(
    sessions: Sequence[Conversation],
    starts_s: Sequence[float],
    *,
    num_users: int | None = None,
    ignore_eos: bool = True,
) -> list[PlannedRequest]:
    """Return the requests of sessions that start at these times, each turn after those that it waits for.

    With `num_users`, so many start at their times, and every other one as soon as its user's session before has ended.
    """
    planned: list[PlannedRequest] = []
    last: list[int] = []  # request of each session

    def add(turn: Turn, session: int, place: int, after: tuple[int, ...], continues: int | None) -> int:
        planned.append(
            PlannedRequest(
                index=len(planned),
                send_at_s=starts_s[session],
                prompt=turn.prompt,
                output_tokens=turn.output_tokens,
                text=turn.text,
                ignore_eos=ignore_eos,
                session=session,
                turn=place,
                after=after,
                gap_s=turn.gap_s,
                continues=continues,
            )
        )
        return planned[-1].index

    for number, session in enumerate(sessions):
        before = () if num_users is None or number < num_users else (last[number - num_users],)
        main = add(session.turns[0], number, 0, before, None)
        agents = tuple(add(each, number, 1, (main,), main) for each in session.agents)
        for place, turn in enumerate(session.turns[1:], start=1 + bool(agents)):
            main, agents = add(turn, number, place, (main, *agents), main), ()
        last.append(max((main, *agents)))
    return planned


def fit_sessions(
    sessions: Iterable[Conversation], max_model_len: int, *, is_chat: bool = False
) -> tuple[list[Conversation], int]:
    """Return the sessions without the turns that make them longer than `max_model_len` tokens, and how many these are.

    A first turn is clipped instead, as other requests are. In a chat each message counts CHAT_TOKENS more.
    """
    fitted, num_clipped = [], 0
    around = CHAT_TOKENS if is_chat else 0
    for session in sessions:
        first, is_clipped = _clipped(session.turns[0], max_model_len - around)
        turns, room = [first], max_model_len - around - first.num_tokens
        agents = tuple(each for each in session.agents if each.num_tokens + around <= room)
        for turn in session.turns[1:]:
            room -= turn.num_tokens + around
            if room < 0:
                break
            turns.append(turn)
        num_clipped += is_clipped + len(session.turns) - len(turns) + len(session.agents) - len(agents)
        fitted.append(Conversation(tuple(turns), agents))
    return fitted, num_clipped


def _clipped(turn: Turn, max_model_len: int) -> tuple[Turn, int]:
    """Return a turn that fits, and 1 if it was clipped for that, else 0."""
    found = fit([Shape(turn.prompt, turn.output_tokens, turn.text)], max_model_len)
    (shape,) = found.shapes
    clipped = replace(turn, prompt=shape.prompt, output_tokens=shape.output_tokens, text=shape.text)
    return clipped, found.num_clipped


# ---- files ----


@dataclass(frozen=True, slots=True)
class _Row:
    """A turn of a file: its text, or else its length. An output of 0 tokens has the length of the flags."""

    text: str
    input_tokens: int
    output_tokens: int
    gap_s: float


def read_sessions(
    path: Path, output_tokens: int, vocab_size: int, seed: int, encode: Callable[[str], Sequence[int]] | None
) -> list[Conversation]:
    """Return the sessions of a file of one of the forms above.

    Turns without a length of their output get `output_tokens`. The tokens of turns without a text are drawn by the
    seed. Raises BenchError, which names file, place and value, and when texts come without `encode`.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_list = file.read(1) == "["
            if not is_list:
                file.seek(0)
                where, first = next(json_rows(file, path), (str(path), {}))
        if is_list:
            groups = list(_vllm_sessions(path, encode))
        elif "session_id" not in first and "turns" not in first:
            if "hash_ids" not in first:
                raise BenchError(f"{where}: a turn has a session_id, and a request of a trace hash_ids")
            return sessions_of_trace(read_mooncake_trace(path), vocab_size, seed)
        else:
            groups = _grouped(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not groups:
        raise BenchError(f"{path} has no sessions")
    ids = ordinary_ids(vocab_size)

    def turn(row: _Row, name: str) -> Turn:
        if row.text and encode is None:
            raise BenchError(f"{path} has texts, whose tokens a tokenizer counts: --tokenizer FOLDER")
        prompt = encode(row.text) if row.text and encode is not None else Random(name).choices(ids, k=row.input_tokens)
        return Turn(tuple(prompt), row.output_tokens or output_tokens, row.gap_s, row.text)

    return [
        Conversation(tuple(turn(row, f"{seed} session {number} {place}") for place, row in enumerate(rows)))
        for number, rows in enumerate(groups)
    ]


def _vllm_sessions(path: Path, encode: Callable[[str], Sequence[int]] | None) -> Iterator[list[_Row]]:
    """Yield the user's turns of each conversation, the system message before the first one's text."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BenchError(f"{path}: no JSON: {error}") from error
    for number, entry in enumerate(entries, start=1):
        where, rows, system = f"{path}, entry {number}", list[_Row](), ""
        messages = parsed(_list_of("messages"), entry, "messages", where)
        for message in messages:
            role, content = (parsed(_text_of(name), message, name, where) for name in ("role", "content"))
            if role == "system":
                system += f"{content}\n"
            elif role == "user":
                rows.append(_Row(system + content, 0, 0, 0.0))
                system = ""
            elif rows and encode is not None:
                rows[-1] = replace(rows[-1], output_tokens=max(1, len(encode(content))))
        if rows:
            yield rows


def _grouped(path: Path) -> list[list[_Row]]:
    """Return the turns of each session of JSON lines, sessions in the order of their first lines."""
    groups: dict[str, list[_Row]] = {}
    last_ms: dict[str, float] = {}
    with path.open(encoding="utf-8-sig") as file:
        for where, entry in json_rows(file, path):
            name = str(entry.get("session_id", where))
            turns = parsed(_list_of("turns"), entry, "turns", where) if "turns" in entry else [entry]
            rows = groups.setdefault(name, [])
            for turn in turns:
                row = parsed(_row, turn, "turn", where)
                if "timestamp" in turn and "delay" not in turn:
                    at_ms = parsed(_gap, turn["timestamp"], "timestamp", where)
                    row = replace(row, gap_s=max(0.0, at_ms - last_ms.get(name, at_ms)) / MS)
                    last_ms[name] = at_ms
                rows.append(row)
            if len(rows) > MAX_TURNS:
                raise BenchError(f"{where}: session {name!r:.80} has more than {MAX_TURNS} turns")
    return [rows for rows in groups.values() if rows]


def _row(turn: Any) -> _Row:
    text = turn.get("text", turn.get("text_input", ""))
    if not isinstance(text, str):
        raise TypeError
    text.encode()  # half of a surrogate pair is no text
    input_tokens = token_count(turn.get("input_length", 0))
    if not (text or input_tokens):
        raise ValueError
    return _Row(text, input_tokens, token_count(turn.get("output_length", 0)), _gap(turn.get("delay") or 0) / MS)


def _gap(value: Any) -> float:
    if isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise ValueError
    return float(value)


def _list_of(name: str) -> Callable[[Any], list[Any]]:
    def read(entry: Any) -> list[Any]:
        if not isinstance(entry, dict) or not isinstance(entry.get(name), list):
            raise TypeError
        return list(entry[name])

    return read


def _text_of(name: str) -> Callable[[Any], str]:
    def read(message: Any) -> str:
        if not isinstance(message, dict) or not isinstance(message.get(name), str):
            raise TypeError
        message[name].encode()
        return str(message[name])

    return read


def sessions_of_trace(traced: Sequence[TracedRequest], vocab_size: int, seed: int) -> list[Conversation]:
    """Return the sessions of a trace with hash ids.

    A request is the next turn of the latest one all of whose full blocks its prompt begins with, and that no other
    request continues. It adds what its prompt has more than that one's prompt and output, at least a token. The delay
    is the time between both in the trace, in which the server then had computed the output.
    """
    ends: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # session and request, by the ids of full blocks
    chains: list[list[tuple[int, int, float]]] = []  # request, tokens that it adds, and delay
    for number, request in enumerate(traced):
        found = next(
            (ends[key] for end in range(len(request.hash_ids), 0, -1) if ends.get(key := request.hash_ids[:end])), None
        )
        if found is None:
            chains.append([(number, request.input_tokens, 0.0)])
            session = len(chains) - 1
        else:
            session, before = found.pop()
            last = traced[before]
            num_added = max(1, request.input_tokens - last.input_tokens - last.output_tokens)
            chains[session].append((number, num_added, request.at_s - last.at_s))
        ends.setdefault(request.hash_ids[:-1], []).append((session, number))
    shapes = trace_load(traced, vocab_size, seed)
    return [
        Conversation(
            tuple(
                Turn(shapes[number].prompt[-num_added:], traced[number].output_tokens, gap_s)
                for number, num_added, gap_s in chain
            )
        )
        for chain in chains
    ]
