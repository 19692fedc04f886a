"""Account for the load of each node: the one record of what the coordinator has given it to do. Pure.

Heartbeats are up to a second old, so placement counts what has been assigned to a node instead. The tracker updates the
account; placement reads it.

The length of an output is estimated from the outputs that ended lately: `max_tokens` is often far more. (TetriInfer,
arXiv 2401.11181, predicts lengths with a model.)
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Final, NamedTuple

from coordinator.control.nodes import Node
from serving_core.due import Due
from serving_core.prefix import BlockNames, child_name, hint_of, root_name


def num_leading(marks: Sequence[int], known: Container[int]) -> int:
    """How many of a prompt's marks are among these, which have with each all those before it too."""
    return bisect_left(marks, True, key=lambda mark: mark not in known)


@dataclass(slots=True)
class Marks:
    """Those of some prompts (Prompt.marks): who has a mark has all those before it too."""

    num_repeated: int = 0  # by so many fewer they would be if each counted once
    _known: set[int] = field(default_factory=set)
    _more: Counter[int] = field(default_factory=Counter)  # of those that several have: who has it beside the first

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, mark: object) -> bool:
        return mark in self._known

    def num_shared(self, marks: Sequence[int]) -> int:
        """Of one of the prompts, with these marks: how many of them another one has too."""
        return num_leading(marks, self._more)

    def num_spared(self, marks: Sequence[int]) -> float:
        """Of one of the prompts, with these marks: how many the others have for it, where all that have a mark have an
        equal part of it."""
        shares = [self._more[mark] for mark in marks[: self.num_shared(marks)]]
        return sum(num_more / (num_more + 1) for num_more in shares)

    def add(self, marks: Sequence[int]) -> None:
        """One more prompt."""
        num_known = num_leading(marks, self._known)
        self._more.update(marks[:num_known])
        self._known.update(marks)
        self.num_repeated += num_known

    def remove(self, marks: Sequence[int]) -> None:
        """One of the prompts."""
        num_shared, more = self.num_shared(marks), self._more
        for mark in marks[:num_shared]:
            more[mark] -= 1
            if not more[mark]:
                del more[mark]
        self._known.difference_update(marks[num_shared:])
        self.num_repeated -= num_shared


class Prompt:
    """The tokens that an attempt begins with, and the LoRA adapter that reads them, if any.

    A block is hashed once for each maker that some node may hold it of, and only when that node holds all blocks before
    it: the nodes of a fleet have one fingerprint and one block size, and so the same names for the same blocks.
    """

    def __init__(
        self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "", *, is_read_whole: bool = False
    ) -> None:
        """`is_read_whole`: every token is computed, whatever is held of it (prefill_node/reading.py)."""
        self._is_read_whole = is_read_whole
        self.token_ids = list(token_ids)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self._names: BlockNames | None = None
        self._root = b""
        self._first: dict[bytes, int] = {}  # hints of what the first block may be called, by maker
        self._marks: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def key(self) -> int:
        """A hash: the same for the same prompt, in this process."""
        return hash((tuple(self.token_ids), self.cache_salt, self.adapter))

    def followed_by(self, token_ids: Sequence[int]) -> "Prompt":
        """The prompt of a later attempt, which reads what was answered so far too, and scores nothing any more."""
        return Prompt([*self.token_ids, *token_ids], self.cache_salt, self.adapter) if token_ids else self

    def tokens_held(self, node: Node) -> int:
        """Leading tokens, in whole blocks, whose KV the node has said to hold. It may have dropped them since."""
        if self._is_read_whole or not node.hints:
            return 0
        block_size = node.block_size
        if len(self) < block_size:
            return 0
        if self._names is None:
            self._root = root_name(node.root_fingerprint, self.cache_salt, self.adapter)
            self._names = BlockNames(self._root, block_size)
        if not self._begins_on(node):
            return 0

        def is_held(name: bytes) -> bool:
            return hint_of(name) in node.hints

        held, _ = self._names.find(self.token_ids, len(self) // block_size, node.makers, is_held)
        return len(held) * block_size

    def _begins_on(self, node: Node) -> bool:
        """Whether the node says to hold the first block; of many nodes, most do not."""
        for maker in node.makers:
            hint = self._first.get(maker)
            if hint is None:
                name = child_name(self._root, maker, self.token_ids[: node.block_size])
                hint = self._first[maker] = hint_of(name)
            if hint in node.hints:
                return True
        return False

    def marks(self, block_size: int) -> Sequence[int]:
        """For each full block a number that stands for all tokens up to its end, within this process."""
        if not self._marks:
            mark = hash((self.cache_salt, self.adapter))
            for start in range(0, len(self) // block_size * block_size, block_size):
                mark = hash((mark, *self.token_ids[start : start + block_size]))
                self._marks.append(mark)
        return self._marks

    def marks_shared(self, block_size: int) -> Sequence[int]:
        """Of the blocks that a node which is to write the answer may have in common with other requests."""
        return () if self._is_read_whole else self.marks(block_size)

    def tokens_to_compute(self, node: Node, coming: Container[int] = ()) -> int:
        """Tokens that a node would have to compute which has the blocks of the marks `coming` by then: at least the
        last one, which gives the first token of the answer, and with it the rest of its block, since blocks are reused
        as a whole."""
        block_size = node.block_size
        num_shared = max(self.tokens_held(node), self.tokens_among(node, coming))
        return len(self) - min(num_shared, (len(self) - 1) // block_size * block_size)

    def tokens_among(self, node: Node, marks: Container[int]) -> int:
        """Leading tokens, in whole blocks, whose marks are among these of prompts of the node."""
        if self._is_read_whole or not marks or not node.shares_blocks:
            return 0
        return num_leading(self.marks(node.block_size), marks) * node.block_size


MAX_LENGTHS: Final = 256
MIN_LENGTHS: Final = 16
MOST: Final = 0.75  # of the answers that came as far got no more


class Lengths:
    """Of the answers that have ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []  # the same: every placement asks, and answers end less often

    def ended(self, num_tokens: int) -> None:
        """An answer got so many."""
        self._lengths.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._lengths) > MAX_LENGTHS:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]

    def left(self, num_output: int, most: int) -> int:
        """How many an answer with so many will hardly exceed, at most `most`, what its request still allows. Where too
        few came as far that is as many again; while few are known it is what is allowed."""
        first = bisect_right(self._sorted, num_output)
        num_further = len(self._sorted) - first
        if num_further < MIN_LENGTHS:
            return min(most, num_output) if num_output and len(self._sorted) >= MIN_LENGTHS else most
        return min(most, self._sorted[first + int(MOST * num_further)] - num_output)


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
