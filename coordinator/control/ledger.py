"""What the coordinator has given each node to do: the one account of load. Pure.

Heartbeats are up to a second old, so whoever decides where work goes counts what has been assigned instead. The tracker
keeps the account; placement asks it.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from coordinator.control.lengths import Lengths
from coordinator.control.marks import Marks, num_leading
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Node
from serving_core.due import Due

RECOUNT_S: Final = 0.1


@dataclass(slots=True)
class Account:
    """What one node has been given and has not finished; tokens are those of each request, whatever it shares."""

    tokens_to_compute: int = 0  # of prompts
    tokens_held: int = 0  # by answers that it writes or is to write: of their prompts, and those that have come since
    num_answers: int = 0  # that it writes or is to write
    num_to_come: int = 0  # of them, those without a token whose prompts other nodes read
    tokens_outgoing: int = 0  # of prompts that it has read for other nodes, which these do not have yet
    num_unread: int = 0  # of the answers, those whose prompts it has yet to read itself


NOTHING: Final = Account()


@dataclass(slots=True)
class _Part:
    """What one request has on one node."""

    tokens_to_compute: int = 0
    tokens_held: int = 0
    is_written: bool = False
    is_to_come: bool = False
    tokens_outgoing: int = 0
    read: Sequence[int] = ()  # marks of the prompt that it reads, or has read and holds
    held: Sequence[int] = ()  # marks of what its pool holds of it, and may hold of other requests as well


class Owed(NamedTuple):
    """What a node is to do of an answer with limits: to compute so many tokens of its prompt, or to write it, or both.
    So many tokens of it have come, and so many are expected, one at least; so many it holds of the pool where it is
    written, with these marks; it is to come where it has none and another node reads its prompt. `reader` is who has
    yet to read the prompt."""

    num_to_compute: int
    tokens_held: int
    held: Sequence[int]
    is_written: bool
    due: Due
    num_output: int
    num_left: int
    is_to_come: bool
    reader: Node | None


class Running(NamedTuple):
    """Answers that have a token, over all nodes: the tokens of each, and what they hold of pools."""

    num_answers: int
    num_tokens: int
    num_tokens_held: int


@dataclass(slots=True)
class _Request:
    """The current attempt at one answer."""

    has_first_token: bool = False
    due: Due | None = None  # of one with limits
    num_output: int = 0  # tokens that have come
    most_output: int = 0  # that are expected in all, at most
    allowed_output: int = 0  # that are allowed in all
    parts: dict[Node, _Part] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        """Tokens that are expected, one at least."""
        return max(1, self.most_output - self.num_output)

    @property
    def reader(self) -> Node | None:
        """Who has yet to read the prompt."""
        return next((node for node, part in self.parts.items() if part.tokens_to_compute), None)


class Ledger:
    """What every node has, by request; an attempt begins with `read` and `write`, on one node or on two."""

    def __init__(self) -> None:
        self.lengths: Final = Lengths()  # by which it is guessed how many tokens are to come
        self._requests: dict[str, _Request] = {}
        self._accounts: dict[Node, Account] = {}
        self._limited: dict[Node, dict[str, _Request]] = {}  # those with limits that have a part on the node
        self._most_left: dict[Node, int] = {}
        self._uncounted: set[Node] = set()  # that have got or lost an answer since
        self._counted_s = -inf  # when all were counted
        self._read: dict[Node, Marks] = {}  # of all its parts, as those have them
        self._held: dict[Node, Marks] = {}

    def of(self, node: Node) -> Account:
        """What a node has. To be read at once, and only read: it goes on changing."""
        return self._accounts.get(node, NOTHING)

    def marks_read(self, node: Node) -> Container[int]:
        """Of the prompts that a node reads, or has read and holds: what another one begins with alike it has by the
        time that this is read (prefill_node/reading.py), and says so much later. To be read at once."""
        return self._read.get(node, ())

    def is_idle(self, node: Node) -> bool:
        """Whether it has finished all that it was given."""
        return self.of(node) == NOTHING

    def tokens_taken(self, node: Node) -> int:
        """Of the node's pool: by answers, and by prompts for other nodes, which hold half of it at most where there are
        answers (serving_node/room.py). What they begin with alike the pool holds once."""
        account, held = self.of(node), self._held.get(node)
        num_outgoing = account.tokens_outgoing
        if held is not None and node.shares_blocks:
            num_outgoing -= held.num_repeated * node.block_size
        return account.tokens_held + min(num_outgoing, node.pool_tokens // 2)

    def tokens_shared(self, node: Node, prompt: Prompt) -> int:
        """Leading tokens of one more prompt that are taken there already."""
        return prompt.tokens_among(node, self._held.get(node, ()))

    def tokens_alone(self, node: Node, owed: Owed) -> int:
        """What comes free in the node's pool when one of its answers ends: what no other request has too."""
        num_shared = self._held[node].num_shared(owed.held) if owed.held and node.shares_blocks else 0
        return owed.tokens_held - num_shared * node.block_size

    def tokens_spared(self, request_id: str) -> float:
        """Of a request's tokens, those that others hold for it where these are most: of a block that k of them have,
        each has the kth part."""
        parts = self._requests.get(request_id, _Request()).parts.items()
        sharing = [(node, part.held) for node, part in parts if part.held and node.shares_blocks]
        return max((self._held[node].num_spared(held) * node.block_size for node, held in sharing), default=0.0)

    def running(self) -> Running:
        """Counted anew each time."""
        begun = [pair for each in self._requests.values() if each.has_first_token for pair in each.parts.items()]
        pairs = [(node, part) for node, part in begun if part.is_written]
        num_tokens = sum(part.tokens_held for _, part in pairs)
        return Running(len(pairs), num_tokens, num_tokens - self._tokens_repeated(pairs))

    def _tokens_repeated(self, pairs: Collection[tuple[Node, _Part]]) -> int:
        """By how much fewer these written parts hold together than one by one."""
        seen: dict[Node, set[int]] = {node: set() for node, part in pairs if part.held and node.shares_blocks}
        num_tokens = 0
        for node, part in pairs:
            if (marks := seen.get(node)) is not None:
                num_seen = num_leading(part.held, marks)
                marks.update(part.held[num_seen : self._held[node].num_shared(part.held)])
                num_tokens += num_seen * node.block_size
        return num_tokens

    @property
    def has_limits(self) -> bool:
        """Whether any answer has."""
        return bool(self._limited)

    def owed(self, node: Node) -> Iterator[Owed]:
        """What a node is to do of each answer with limits. To be read at once."""
        for request in self._limited.get(node, {}).values():
            part = request.parts[node]
            assert request.due is not None
            yield Owed(
                part.tokens_to_compute,
                part.tokens_held,
                part.held,
                part.is_written,
                request.due,
                request.num_output,
                request.num_left,
                part.is_to_come,
                node if part.tokens_to_compute else request.reader,
            )

    def most_left(self, now: float) -> Mapping[Node, int]:
        """Of the answers with limits that each node writes, the most tokens that are expected of one. Those that have
        come since are counted every RECOUNT_S."""
        if now - self._counted_s >= RECOUNT_S:
            self._counted_s = now
            self._uncounted = set(self._limited)
        for node in self._uncounted:
            written = [each.num_left for each in self._limited.get(node, {}).values() if each.parts[node].is_written]
            if written:
                self._most_left[node] = max(written)
            else:
                self._most_left.pop(node, None)
        self._uncounted.clear()
        return self._most_left

    # ---- what the tracker tells ----

    def owe(self, request_id: str, due: Due, num_output: int, most_left: int) -> None:
        """The attempt that begins has limits; so many tokens of the answer have come before, and so many more are
        allowed."""
        request = self._requests.setdefault(request_id, _Request())
        request.due, request.num_output, request.allowed_output = due, num_output, num_output + most_left
        self._guess(request)

    def _guess(self, request: _Request) -> None:
        """How many tokens the answer will have, now that it has so many."""
        num_left = self.lengths.left(request.num_output, request.allowed_output - request.num_output)
        request.most_output = request.num_output + num_left

    def read(self, request_id: str, node: Node, num_tokens: int, marks: Sequence[int] = ()) -> None:
        """The node is to compute so many tokens of the prompt, which has these marks (Prompt.marks)."""
        part = self._take(request_id, node)
        _change(self._read, node, part.read, marks)
        part.read = marks
        part.tokens_to_compute, part.is_to_come = num_tokens, False
        self._put(request_id, node, part)

    def write(self, request_id: str, node: Node, num_tokens: int, marks: Sequence[int] = ()) -> None:
        """The node is to write the answer, which has so many tokens when it begins there. `marks`: of those that it
        shares with whoever else has them on the node (Prompt.marks_shared)."""
        part = self._take(request_id, node)
        self._hold(node, part, marks)
        has_first_token = self._requests[request_id].has_first_token
        part.tokens_held, part.tokens_outgoing, part.is_written = num_tokens, 0, True
        part.is_to_come = not part.tokens_to_compute and not has_first_token
        self._put(request_id, node, part)

    def progressed(self, request_id: str, node: Node, num_left: int) -> None:
        """The node has computed some of the prompt, and so many tokens are left, one at least."""
        part = self._take(request_id, node)
        part.tokens_to_compute = min(part.tokens_to_compute, max(1, num_left))
        self._put(request_id, node, part)

    def first_token(self, request_id: str, now: float) -> None:
        """The prompt is read. A node that was to do nothing else holds it until it lets go."""
        request = self._requests[request_id]
        request.has_first_token = True
        if request.due is not None and request.due.began_s is None:
            request.due.began_s = now
        written = next((part for part in request.parts.values() if part.is_written), _Part())
        for node in list(request.parts):
            part = self._take(request_id, node)
            part.tokens_to_compute, part.is_to_come = 0, False
            if not part.is_written:
                part.tokens_outgoing = written.tokens_held
                self._hold(node, part, written.held)
            self._put(request_id, node, part)

    def tokens_came(self, request_id: str, node: Node, num_tokens: int) -> None:
        """The answer has grown on the node that writes it."""
        request = self._requests[request_id]
        request.num_output += num_tokens
        if request.due is not None and request.num_output >= request.most_output:
            self._guess(request)
        request.parts[node].tokens_held += num_tokens
        self._accounts[node].tokens_held += num_tokens

    def let_go(self, request_id: str, node: Node) -> None:
        """The request is not the node's to work on any more, if it ever was."""
        request = self._requests.get(request_id)
        if request is not None and node in request.parts:
            part = self._take(request_id, node)
            self._forget_marks(node, part)
            self._put(request_id, node, _Part())

    def end(self, request_id: str) -> None:
        """The attempt is over on every node, if there is one."""
        request = self._requests.get(request_id, _Request())
        for node in list(request.parts):
            self.let_go(request_id, node)
        self._requests.pop(request_id, None)

    def check_integrity(self) -> None:
        """Every account is the sum of its parts, and no other node has one."""
        sums: dict[Node, Account] = {}
        for request in self._requests.values():
            for node, part in request.parts.items():
                _count(sums.setdefault(node, Account()), part, 1)
        assert sums == self._accounts, (sums, self._accounts)
        read: dict[Node, Marks] = {}
        held: dict[Node, Marks] = {}
        for request in self._requests.values():
            for node, part in request.parts.items():
                _change(read, node, (), part.read)
                _change(held, node, (), part.held)
        assert (read, held) == (self._read, self._held)
        limited = {key: request for key, request in self._requests.items() if request.due is not None}
        assert self._limited == {
            node: {key: request for key, request in limited.items() if node in request.parts}
            for node in {node for request in limited.values() for node in request.parts}
        }

    # ---- parts and their sums ----

    def _take(self, request_id: str, node: Node) -> _Part:
        """The part, taken out of the account: `_put` is to follow."""
        part = self._requests.setdefault(request_id, _Request()).parts.pop(node, _Part())
        self._note_limited(node, request_id)
        _count(self._accounts.setdefault(node, Account()), part, -1)
        return part

    def _put(self, request_id: str, node: Node, part: _Part) -> None:
        account = self._accounts[node]
        if part.tokens_to_compute or part.is_written or part.tokens_outgoing:
            self._requests[request_id].parts[node] = part
            self._note_limited(node, request_id)
            _count(account, part, 1)
        else:
            self._forget_marks(node, part)
        if account == NOTHING:
            del self._accounts[node]

    def _hold(self, node: Node, part: _Part, marks: Sequence[int]) -> None:
        _change(self._held, node, part.held, marks)
        part.held = marks

    def _forget_marks(self, node: Node, part: _Part) -> None:
        _change(self._read, node, part.read, ())
        part.read = ()
        self._hold(node, part, ())

    def _note_limited(self, node: Node, request_id: str) -> None:
        """After a part has come or gone."""
        request, limited = self._requests[request_id], self._limited
        if request.due is None:
            return
        self._uncounted.add(node)
        if node in request.parts:
            limited.setdefault(node, {})[request_id] = request
        elif node in limited:
            limited[node].pop(request_id, None)
            if not limited[node]:
                del limited[node]


def _change(marks: dict[Node, Marks], node: Node, old: Sequence[int], new: Sequence[int]) -> None:
    """The marks of one part on the node are others now."""
    if new:
        marks.setdefault(node, Marks()).add(new)
    if old:
        marks[node].remove(old)
        if not marks[node]:
            del marks[node]


def _count(account: Account, part: _Part, sign: int) -> None:
    account.tokens_to_compute += sign * part.tokens_to_compute
    account.tokens_held += sign * part.tokens_held
    account.num_answers += sign * part.is_written
    account.num_unread += sign * (part.is_written and part.tokens_to_compute > 0)
    account.num_to_come += sign * part.is_to_come
    account.tokens_outgoing += sign * part.tokens_outgoing
