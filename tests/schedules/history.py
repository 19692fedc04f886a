"""What happened in a simulated fleet, and whether it may happen. Pure: it knows nothing of coordinator and nodes.

The clients' side of each request, every write to a block with those who held it then, and what is left when all is
over: from these the checker works out whether every promise was kept.
"""

from dataclasses import dataclass, field

from tests.schedules.model import answer_of

DEADLINE_SLACK_S = 2.0  # after its deadline a request has ended, but for the time that its coordinator stood still
BLAMES = ("BAD_PARAM", "DUPLICATE_REQUEST_ID", "MALFORMED_REQUEST", "PAIRING_MISMATCH", "PROMPT_TOO_LONG")
"""Ends that no request of a schedule deserves: all of them are good, and fit."""
LIVE_S = 20.0  # after the last fault everything has ended, and nothing is held


@dataclass(frozen=True, slots=True)
class Asked:
    """A client has sent a request."""

    time_s: float
    request: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens have come to its client."""

    time_s: float
    request: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Its client has heard the end: "length" or "abort" with a number of tokens, or the reason of an error."""

    time_s: float
    request: str
    how: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """The client has gone, and listens to nothing any more."""

    time_s: float
    request: str


@dataclass(frozen=True, slots=True)
class Wrote:
    """A node has written KV to a block of its pool: in a step or from a transfer. `holders` are the attempts whose
    lease the block was in, each a request's id and an epoch."""

    time_s: float
    node: str
    block: int
    epoch: int
    by: str
    holders: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Stood:
    """The coordinator has stood still, or was not there."""

    time_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Calm:
    """The last fault is over: all processes run, and the network is what it should be."""

    time_s: float


@dataclass(frozen=True, slots=True)
class Crashed:
    """Something was raised that nobody expects."""

    time_s: float
    process: str
    what: str


@dataclass(frozen=True, slots=True)
class Rest:
    """What somebody still holds when the schedule is over."""

    time_s: float
    process: str
    what: str
    count: int


@dataclass(frozen=True, slots=True)
class Note:
    """For readers."""

    time_s: float
    text: str


Event = Asked | Told | Ended | Left | Wrote | Stood | Calm | Crashed | Rest | Note


@dataclass(slots=True)
class _Request:
    """A request as its client sees it."""

    asked: Asked
    tokens: list[int] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)
    has_left: bool = False


def problems_of(events):
    """What must not be, in sentences; none where all is well."""
    events = list(events)
    return [
        *_crashes(events),
        *_of_requests(events),
        *_of_writes(events),
        *_leftovers(events),
    ]


def trace_of(events):
    """The history for readers, without the writes."""
    return "\n".join(f"{event.time_s:9.4f} {_text(event)}" for event in events if not isinstance(event, Wrote))


def _text(event):
    if isinstance(event, Note):
        return event.text
    fields = [f"{name}={getattr(event, name)}" for name in event.__slots__ if name != "time_s"]
    return f"** {type(event).__name__} {' '.join(fields)}"


def _crashes(events):
    for event in events:
        if isinstance(event, Crashed):
            yield f"{event.process} raised what nobody expects: {event.what}"


# ---- requests ----


def _of_requests(events):
    requests = {}
    stood_s, calm_s = 0.0, None
    for event in events:
        match event:
            case Asked():
                requests[event.request] = _Request(event)
            case Told():
                yield from _told(requests[event.request], event)
            case Ended():
                requests[event.request].ends.append(event)
            case Left():
                requests[event.request].has_left = True
            case Stood():
                stood_s += event.seconds
            case Calm():
                calm_s = event.time_s
    for request in requests.values():
        yield from _ends(request, stood_s, calm_s)


def _told(request, event):
    name, tokens = event.request, request.tokens
    if request.ends:
        yield f"request {name} got tokens after its end"
    if event.first_index < len(tokens):
        yield f"request {name} got token {event.first_index} twice"
    elif event.first_index > len(tokens):
        yield f"request {name} never got token {len(tokens)}, and then token {event.first_index}"
    tokens += event.token_ids


def _ends(request, stood_s, calm_s):
    asked, tokens = request.asked, request.tokens
    name = asked.request
    expected = answer_of(asked.prompt, max(asked.max_tokens, 1), asked.salt)
    yield from _compare(name, tokens, expected)
    if len(request.ends) > 1:
        yield f"request {name} ended {len(request.ends)} times: {', '.join(end.how for end in request.ends)}"
    if not request.ends:
        if not request.has_left:
            yield f"request {name} never ended"
        return
    end = request.ends[0]
    if end.how in BLAMES:
        yield f"request {name} ended with {end.how}, and there was nothing wrong with it"
    if end.time_s > asked.deadline_s + DEADLINE_SLACK_S + stood_s:
        yield f"request {name} ended {end.time_s - asked.deadline_s:.1f} s after its deadline"
    if calm_s is not None and end.time_s > max(calm_s, asked.time_s) + LIVE_S:
        yield f"request {name} ended {end.time_s - calm_s:.1f} s after the last fault"
    if end.num_tokens is not None and end.num_tokens != len(tokens):
        yield f"request {name} was told of {end.num_tokens} tokens at its end, and got {len(tokens)}"
    if end.how == "length" and len(tokens) != asked.max_tokens:
        yield f"request {name} ended as complete with {len(tokens)} of {asked.max_tokens} tokens"


def _compare(name, tokens, expected):
    """With what the model says. Told apart: a token that came twice, one that was left out, a wrong one."""
    for index, token_id in enumerate(tokens):
        if index < len(expected) and token_id == expected[index]:
            continue
        if index and token_id == tokens[index - 1]:
            yield f"request {name} got token {index - 1} doubled, at index {index}"
        elif token_id in expected[index + 1 :]:
            yield f"request {name} lost token {index}: the one of a later index came"
        else:
            wanted = expected[index] if index < len(expected) else "nothing"
            yield f"request {name} got the wrong token {token_id} at index {index}: the model says {wanted}"
        return


# ---- blocks ----


def _of_writes(events):
    """At any time one attempt alone may write to a block: the one whose lease it is in, which nobody shares."""
    seen = set[str]()
    for event in events:
        if not isinstance(event, Wrote):
            continue
        where = f"block {event.block} of {event.node}"
        epochs = [epoch for _, epoch in event.holders]
        problem = None
        if not epochs:
            problem = f"a {event.by} of epoch {event.epoch} wrote to {where}, which nobody held"
        elif event.epoch not in epochs:
            problem = f"a {event.by} of epoch {event.epoch} wrote to {where}, which epoch {epochs[0]} held"
        elif len(epochs) > 1:
            problem = f"a {event.by} of epoch {event.epoch} wrote to {where}, which {len(epochs)} attempts held"
        if problem is not None and problem not in seen:
            seen.add(problem)
            yield problem


# ---- the end ----


def _leftovers(events):
    for event in events:
        if isinstance(event, Rest) and event.count:
            yield f"{event.process} still holds {event.count} {event.what}"
