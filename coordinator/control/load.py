"""Account for the load of each node: the one record of what the coordinator has given it to do. Pure.

Heartbeats are up to a second old, so placement counts what has been assigned to a node instead. The scheduler updates
the account; placement reads it.

The length of an output is estimated from the outputs that ended lately: `max_tokens` is often far more. (TetriInfer,
arXiv 2401.11181, predicts lengths with a model.)
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Final, NamedTuple

from coordinator.control.nodes import Node
from serving_core.node.prefix import child_name, hint_of, root_name
from serving_core.slo import Due


def num_leading(hashes: Sequence[int], known: Container[int]) -> int:
    """Return how many leading hashes of a prompt are in `known`.

    `known` must hold, with each block hash, all hashes before it in the prompt.
    """
    return bisect_left(hashes, True, key=lambda block_hash: block_hash not in known)


@dataclass(slots=True)
class HashCounts:
    """Count the block hashes of several prompts: a prompt that has one of them has all those before it too."""

    num_repeated: int = 0  # hashes of all prompts, less the distinct ones
    _known: set[int] = field(default_factory=set)
    _more: Counter[int] = field(default_factory=Counter)  # prompts beside the first that have the hash

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._known

    def num_shared(self, hashes: Sequence[int]) -> int:
        """Return how many of the leading hashes of a counted prompt another counted prompt has too."""
        return num_leading(hashes, self._more)

    def num_spared(self, hashes: Sequence[int]) -> float:
        """Return the number of blocks that sharing spares one counted prompt.

        Of a block that k prompts have, each holds the k-th part, so that sharing spares each prompt 1 - 1/k of it.
        """
        shares = [self._more[block_hash] for block_hash in hashes[: self.num_shared(hashes)]]
        return sum(num_more / (num_more + 1) for num_more in shares)

    def add(self, hashes: Sequence[int]) -> None:
        """Add the hashes of one more prompt."""
        num_known = num_leading(hashes, self._known)
        self._more.update(hashes[:num_known])
        self._known.update(hashes)
        self.num_repeated += num_known

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove the hashes of a prompt that `add` has added."""
        num_shared, more = self.num_shared(hashes), self._more
        for block_hash in hashes[:num_shared]:
            more[block_hash] -= 1
            if not more[block_hash]:
                del more[block_hash]
        self._known.difference_update(hashes[num_shared:])
        self.num_repeated -= num_shared


class Prompt:
    """Hold the tokens that an attempt prefills and their LoRA adapter, and find their cached blocks.

    Block hashes are computed once per numerics id, and only as far as a node has all blocks before: the nodes of a
    fleet have one fingerprint and one block size, so a block has the same hash on all of them. A node evicts a block
    after those behind it (serving_core/node/blocks.py), so that a few looks find how many of the known blocks it has.
    Where vLLM or KV offload drops a block earlier, the number may be too high: placement is then less good, no more.
    """

    def __init__(
        self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "", *, is_read_whole: bool = False
    ) -> None:
        """Create a prompt. With `is_read_whole` every token is computed, whatever is cached
        (prefill_node/scheduler.py)."""
        self._is_computed_whole = is_read_whole
        self.token_ids = list(token_ids)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self._root = b""
        self._children: dict[tuple[bytes, bytes], bytes] = {}  # block hashes, by parent and numerics id
        self._chain: list[bytes] = []  # block hashes of the prompt's beginning, the longest that any node has had
        self._hints: list[int] = []  # the same, shortened
        self._block_hashes: list[int] = []
        self._beginning: Prompt | None = None  # a prompt that this one begins with: its blocks are hashed once

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def key(self) -> int:
        """Return a hash that is the same for the same prompt, within this process."""
        return hash((tuple(self.token_ids), self.cache_salt, self.adapter))

    def followed_by(self, token_ids: Sequence[int]) -> "Prompt":
        """Return the prompt with these tokens behind it. It needs no prompt logprobs."""
        if not token_ids:
            return self
        longer = Prompt([*self.token_ids, *token_ids], self.cache_salt, self.adapter)
        longer._beginning = self
        return longer

    def tokens_cached(self, node: Node) -> int:
        """Return the number of leading tokens, in whole blocks, that the node has reported as cached.

        It may have evicted them since. 0 for a prompt that is computed whole.
        """
        if self._is_computed_whole or not node.hints:
            return 0
        if not self._root:
            self._root = root_name(node.root_fingerprint, self.cache_salt, self.adapter)
        count, hints = num_leading(self._hints, node.hints), node.hints
        parent = self._chain[count - 1] if count else self._root
        for index in range(count, len(self) // node.block_size):
            names = (self._child(parent, numerics_id, index, node.block_size) for numerics_id in node.numerics_ids)
            name = next((name for name in names if hint_of(name) in hints), None)
            if name is None:
                break
            if index == len(self._chain) and parent == (self._chain[-1] if index else self._root):
                self._chain.append(name)
                self._hints.append(hint_of(name))
            parent, count = name, index + 1
        return count * node.block_size

    def _child(self, parent: bytes, numerics_id: bytes, index: int, block_size: int) -> bytes:
        name = self._children.get((parent, numerics_id))
        if name is None:
            token_ids = self.token_ids[index * block_size : (index + 1) * block_size]
            name = self._children[parent, numerics_id] = child_name(parent, numerics_id, token_ids)
        return name

    def block_hashes(self, block_size: int) -> Sequence[int]:
        """Return a number for each full block that identifies all tokens up to its end, within this process."""
        if not self._block_hashes:
            hashes = list(self._beginning.block_hashes(block_size)) if self._beginning is not None else []
            block_hash = hashes[-1] if hashes else hash((self.cache_salt, self.adapter))
            for start in range(len(hashes) * block_size, len(self) // block_size * block_size, block_size):
                block_hash = hash((block_hash, *self.token_ids[start : start + block_size]))
                hashes.append(block_hash)
            self._block_hashes = hashes
        return self._block_hashes

    def hashes_shared(self, block_size: int) -> Sequence[int]:
        """Return the hashes of the full blocks, which a decode node may share between this request and others.

        Empty for a prompt that is computed whole. Equal only within this process.
        """
        return () if self._is_computed_whole else self.block_hashes(block_size)

    def tokens_to_compute(self, node: Node, coming: Container[int] = (), num_cached: int | None = None) -> int:
        """Return how many tokens of the prompt the node has to compute: those neither cached nor in `coming`.

        `coming` are block hashes of prompts that the node is computing; `num_cached` is what `tokens_cached` returned
        for the node, where the caller has it. Blocks are reused as a whole, and the last token is always computed for
        the first output token: with it the rest of its block.
        """
        num_cached = self.tokens_cached(node) if num_cached is None else num_cached
        return self.tokens_beyond(node, max(num_cached, self.tokens_among(node, coming)))

    def tokens_beyond(self, node: Node, num_held: int) -> int:
        """Return how many tokens the node has to compute if it holds the first `num_held`, in whole blocks."""
        return len(self) - min(num_held, (len(self) - 1) // node.block_size * node.block_size)

    def tokens_among(self, node: Node, hashes: Container[int]) -> int:
        """Return the number of leading tokens, in whole blocks, whose block hashes are in `hashes`.

        0 if the node shares no blocks between requests, or the prompt is computed whole.
        """
        if self._is_computed_whole or not hashes or not node.shares_blocks:
            return 0
        return num_leading(self.block_hashes(node.block_size), hashes) * node.block_size


MAX_LENGTHS: Final = 256
MIN_LENGTHS: Final = 16
MOST: Final = 0.75  # quantile of the recorded lengths that is expected


class LengthEstimator:
    """Estimate output lengths from the outputs that ended by themselves."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []  # the same, sorted: every placement reads it, and outputs end less often

    def ended(self, num_tokens: int) -> None:
        """Record the length of an output, in tokens."""
        self._lengths.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._lengths) > MAX_LENGTHS:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]

    def left(self, num_output: int, most: int) -> int:
        """Return how many more tokens an output with `num_output` tokens will hardly exceed, `most` at most.

        This is the MOST quantile of the recorded outputs that were longer, less `num_output`. Where fewer than
        MIN_LENGTHS were longer, it is `num_output`; while fewer than MIN_LENGTHS are recorded, it is `most`.
        """
        first = bisect_right(self._sorted, num_output)
        num_further = len(self._sorted) - first
        if num_further < MIN_LENGTHS:
            return min(most, num_output) if num_output and len(self._sorted) >= MIN_LENGTHS else most
        return min(most, self._sorted[first + int(MOST * num_further)] - num_output)


MAX_TIMES: Final = 32


class RateEstimator:
    """Measure the rate of one kind of event over its last MAX_TIMES occurrences."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)  # time and amount of each event

    def add(self, now: float, amount: float = 1.0) -> None:
        """Record an event at `now`, in seconds, that counts `amount`."""
        self._times.append((now, amount))

    def per_s(self, now: float) -> float:
        """Return the sum of the recorded amounts per second until `now`; 0 before there are two events."""
        if len(self._times) < 2:
            return 0.0
        first_s, first = self._times[0]
        amount, seconds = sum(each for _, each in self._times) - first, now - first_s
        return amount / seconds if seconds > 0 else 0.0


class Arrivals(NamedTuple):
    """The expected arrivals of requests with an SLO on TTFT: requests per second, mean tokens to compute, and mean
    output tokens."""

    per_s: float
    num_tokens: float
    num_output: float = 0.0


NO_ARRIVALS: Final = Arrivals(0.0, 0.0)


class ArrivalEstimator:
    """Measure the arrivals of requests with an SLO on TTFT."""

    def __init__(self) -> None:
        self._requests, self._tokens, self._outputs = RateEstimator(), RateEstimator(), RateEstimator()

    def add(self, now: float, num_tokens: int, num_output: int) -> None:
        """Record a new request with `num_tokens` prompt tokens to compute, of which `num_output` output tokens are
        expected."""
        self._requests.add(now)
        self._tokens.add(now, num_tokens)
        self._outputs.add(now, num_output)

    def expected(self, now: float) -> Arrivals:
        """Return the rate and the mean size of recent arrivals, as the prediction of those to come."""
        per_s = self._requests.per_s(now)
        if not per_s:
            return NO_ARRIVALS
        return Arrivals(per_s, self._tokens.per_s(now) / per_s, self._outputs.per_s(now) / per_s)


RECOUNT_S: Final = 0.1


@dataclass(slots=True)
class Account:
    """Sum what one node has been given and has not finished. Tokens that requests share count for each of them."""

    tokens_to_compute: int = 0  # prompt tokens
    tokens_held: int = 0  # prompt and output tokens of the sequences that it decodes or will decode
    num_sequences: int = 0  # sequences that it decodes or will decode
    num_arriving: int = 0  # those of num_sequences without a token that other nodes prefill
    tokens_outgoing: int = 0  # of prompts that it has prefilled for other nodes and still holds
    num_unprefilled: int = 0  # those of num_sequences that it still has to prefill itself


NOTHING: Final = Account()


@dataclass(slots=True)
class Part:
    """The part of one node in one request; read it at once, it changes with the ledger.

    request             the attempt that the part is of
    tokens_to_compute   tokens of the prompt to be prefilled here
    tokens_held         tokens of the pool that the sequence holds here
    is_decoded          the sequence is decoded here
    is_arriving         the sequence has no token yet, and another node prefills it
    tokens_outgoing     tokens of a prompt that is prefilled, held for the node that decodes it
    prefill_hashes      hashes of the prompt that the node prefills, or has prefilled and holds
    decode_hashes       hashes of the blocks that it may share with other requests
    """

    request: "LiveRequest" = field(repr=False, compare=False)
    tokens_to_compute: int = 0
    tokens_held: int = 0
    is_decoded: bool = False
    is_arriving: bool = False
    tokens_outgoing: int = 0
    prefill_hashes: Sequence[int] = ()
    decode_hashes: Sequence[int] = ()


class Running(NamedTuple):
    """Count the sequences that have a token, over all nodes: their tokens, and the pool tokens that they hold."""

    num_sequences: int
    num_tokens: int
    num_tokens_held: int


@dataclass(slots=True)
class LiveRequest:
    """The current attempt of one request, as the ledger has it."""

    has_first_token: bool = False
    due: Due | None = None  # only with an SLO
    num_output: int = 0  # output tokens that have come
    most_output: int = 0  # output tokens expected in all
    allowed_output: int = 0  # output tokens allowed in all
    parts: dict[Node, Part] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        """Return the number of tokens expected, at least 1."""
        num_left = self.most_output - self.num_output
        return num_left if num_left > 1 else 1  # `max` takes twice the time; placement asks for every sequence

    @property
    def prefill_node(self) -> Node | None:
        """Return the node that still has to prefill the prompt."""
        return next((node for node, part in self.parts.items() if part.tokens_to_compute), None)


LimitedPart = tuple[Part, LiveRequest, Due]
"""A node's part in a request with an SLO, the request, and its deadlines."""


class Ledger:
    """Account for what every node has been given, by request. An attempt begins with `prefill` and `decode`."""

    def __init__(self) -> None:
        self.lengths: Final = LengthEstimator()  # estimates how many tokens will come
        self._requests: dict[str, LiveRequest] = {}
        self._accounts: dict[Node, Account] = {}
        self._limited: dict[Node, dict[str, Part]] = {}  # parts of requests with an SLO
        self._most_left: dict[Node, int] = {}
        self._uncounted: set[Node] = set()  # nodes whose _most_left is out of date
        self._counted_s = -inf  # when all nodes were last counted
        self._prefill_hashes: dict[Node, HashCounts] = {}  # of all parts of the node, as Part has them
        self._decode_hashes: dict[Node, HashCounts] = {}

    def of(self, node: Node) -> Account:
        """Return the sums of what a node has been given and not finished.

        Use them at once: they change with the ledger.
        """
        return self._accounts.get(node, NOTHING)

    def prefill_hashes(self, node: Node) -> Container[int]:
        """Return the block hashes of the prompts that a node prefills, or has prefilled and still holds.

        Use them at once. A prompt with the same beginning finds these blocks once they are prefilled
        (prefill_node/scheduler.py); the node reports them much later.
        """
        return self._prefill_hashes.get(node, ())

    def is_idle(self, node: Node) -> bool:
        """Return whether the node has finished all that it was given."""
        return self.of(node) == NOTHING

    def tokens_taken(self, node: Node) -> int:
        """Return the tokens of the node's KV cache that its requests take, shared blocks counted once.

        Besides sequences, prompts for other nodes count, up to half of the cache (serving_node/admission.py).
        """
        account, hashes = self.of(node), self._decode_hashes.get(node)
        num_outgoing = account.tokens_outgoing
        if hashes is not None and node.shares_blocks:
            num_outgoing -= hashes.num_repeated * node.block_size
        return account.tokens_held + min(num_outgoing, node.pool_tokens // 2)

    def tokens_shared(self, node: Node, prompt: Prompt) -> int:
        """Return the number of leading tokens, in whole blocks, that `prompt` shares with requests given to the node.

        These are the sequences that the node decodes or will decode, and the prompts that it holds for other nodes.
        Blocks that are only cached do not count.
        """
        return prompt.tokens_among(node, self._decode_hashes.get(node, ()))

    def tokens_alone(self, node: Node, part: Part) -> int:
        """Return the tokens of KV cache that become free when this sequence of the node ends.

        Tokens in blocks that another request of the node shares are left out.
        """
        num_shared = (
            self._decode_hashes[node].num_shared(part.decode_hashes) if part.decode_hashes and node.shares_blocks else 0
        )
        return part.tokens_held - num_shared * node.block_size

    def tokens_spared(self, request_id: str) -> float:
        """Return how many tokens of KV cache sharing spares a request, on the node where this is most.

        Of a block that k requests share, each holds the k-th part. 0 for an unknown request.
        """
        parts = self._requests.get(request_id, LiveRequest()).parts.items()
        sharing = [(node, part.decode_hashes) for node, part in parts if part.decode_hashes and node.shares_blocks]
        return max(
            (self._decode_hashes[node].num_spared(hashes) * node.block_size for node, hashes in sharing), default=0.0
        )

    def running(self) -> Running:
        """Return the number of running sequences and of their tokens. The cost grows with the number of requests."""
        begun = [pair for each in self._requests.values() if each.has_first_token for pair in each.parts.items()]
        pairs = [(node, part) for node, part in begun if part.is_decoded]
        num_tokens = sum(part.tokens_held for _, part in pairs)
        return Running(len(pairs), num_tokens, num_tokens - self._tokens_repeated(pairs))

    def _tokens_repeated(self, pairs: Collection[tuple[Node, Part]]) -> int:
        """Return by how many tokens sharing reduces what these decoded parts hold together."""
        seen: dict[Node, set[int]] = {node: set() for node, part in pairs if part.decode_hashes and node.shares_blocks}
        num_tokens = 0
        for node, part in pairs:
            if (hashes := seen.get(node)) is not None:
                num_seen = num_leading(part.decode_hashes, hashes)
                hashes.update(part.decode_hashes[num_seen : self._decode_hashes[node].num_shared(part.decode_hashes)])
                num_tokens += num_seen * node.block_size
        return num_tokens

    @property
    def has_limits(self) -> bool:
        """Return whether any request of the ledger has an SLO."""
        return bool(self._limited)

    def limited_parts(self, node: Node) -> list[LimitedPart]:
        """Return the parts of the node in requests with an SLO. Use them before the ledger changes."""
        parts = self._limited.get(node, {}).values()
        return [(part, part.request, due) for part in parts if (due := part.request.due) is not None]

    def most_left(self, now: float) -> Mapping[Node, int]:
        """Return, for each node that decodes sequences with an SLO, the most tokens expected of one of them.

        Sequences that have yet to be prefilled do not count. Tokens that came are subtracted only every RECOUNT_S
        seconds. Do not change the map.
        """
        if now - self._counted_s >= RECOUNT_S:
            self._counted_s = now
            self._uncounted = set(self._limited)
        for node in self._uncounted:
            decoded = [
                request.num_left
                for part, request, _ in self.limited_parts(node)
                if part.is_decoded and request.has_first_token
            ]
            if decoded:
                self._most_left[node] = max(decoded)
            else:
                self._most_left.pop(node, None)
        self._uncounted.clear()
        return self._most_left

    # ---- events of the scheduler ----

    def set_due(self, request_id: str, due: Due, num_output: int, most_left: int) -> None:
        """Record the deadlines of a request's attempt that begins, which make it a request with an SLO.

        `num_output` output tokens have come, and at most `most_left` more are allowed.
        """
        request = self._requests.setdefault(request_id, LiveRequest())
        request.due, request.num_output, request.allowed_output = due, num_output, num_output + most_left
        self._guess(request)

    def _guess(self, request: LiveRequest) -> None:
        """Estimate the length of the output from its present length."""
        num_left = self.lengths.left(request.num_output, request.allowed_output - request.num_output)
        request.most_output = request.num_output + num_left

    def prefill(self, request_id: str, node: Node, num_tokens: int, hashes: Sequence[int] = ()) -> None:
        """Record that the node is to compute `num_tokens` tokens of a prompt, whose block hashes are `hashes`."""
        node.num_prefills += 1
        part = self._take(request_id, node)
        _change(self._prefill_hashes, node, part.prefill_hashes, hashes)
        part.prefill_hashes = hashes
        part.tokens_to_compute, part.is_arriving = num_tokens, False
        self._put(request_id, node, part)

    def decode(self, request_id: str, node: Node, num_tokens: int, hashes: Sequence[int] = ()) -> None:
        """Record that the node is to decode the sequence, which has `num_tokens` tokens when it starts there.

        `hashes` are those of the blocks that it may share with other requests on the node (Prompt.hashes_shared).
        """
        node.num_decodes += 1
        part = self._take(request_id, node)
        self._hold(node, part, hashes)
        has_first_token = self._requests[request_id].has_first_token
        part.tokens_held, part.tokens_outgoing, part.is_decoded = num_tokens, 0, True
        part.is_arriving = not part.tokens_to_compute and not has_first_token
        self._put(request_id, node, part)

    def progressed(self, request_id: str, node: Node, num_left: int) -> None:
        """Record that the node has computed a part of the prompt, so that `num_left` tokens are left; 1 at least."""
        part = self._take(request_id, node)
        part.tokens_to_compute = min(part.tokens_to_compute, max(1, num_left))
        self._put(request_id, node, part)

    def first_token(self, request_id: str, now: float) -> None:
        """Record that the prompt is prefilled and the first token sampled, at `now`.

        A prefill node that does not decode the request holds the prompt until `release`.
        """
        request = self._requests[request_id]
        request.has_first_token = True
        if request.due is not None and request.due.began_s is None:
            request.due.began_s = now
        decoded = next((part for part in request.parts.values() if part.is_decoded), Part(request))
        for node in list(request.parts):
            part = self._take(request_id, node)
            part.tokens_to_compute, part.is_arriving = 0, False
            if not part.is_decoded:
                part.tokens_outgoing = decoded.tokens_held
                self._hold(node, part, decoded.decode_hashes)
            self._put(request_id, node, part)

    def tokens_came(self, request_ids: Sequence[str], node: Node, num_tokens: int = 1) -> None:
        """Record `num_tokens` new tokens of each of these sequences on their decode node."""
        requests = self._requests
        for request_id in request_ids:
            request = requests[request_id]
            request.num_output += num_tokens
            if request.due is not None and request.num_output >= request.most_output:
                self._guess(request)
            request.parts[node].tokens_held += num_tokens
        if request_ids:
            self._accounts[node].tokens_held += num_tokens * len(request_ids)

    def release(self, request_id: str, node: Node) -> None:
        """Record that the node no longer computes or holds anything of the request. Ignored if it did not before."""
        request = self._requests.get(request_id)
        if request is not None and node in request.parts:
            part = self._take(request_id, node)
            self._forget_hashes(node, part)
            self._put(request_id, node, Part(request))

    def end(self, request_id: str) -> None:
        """Record that the request's attempt is over on every node, and forget the request. Ignored if it is unknown."""
        request = self._requests.get(request_id, LiveRequest())
        for node in list(request.parts):
            self.release(request_id, node)
        self._requests.pop(request_id, None)

    def check_integrity(self) -> None:
        """Assert that every account is the sum of its parts. For tests."""
        sums: dict[Node, Account] = {}
        for request in self._requests.values():
            for node, part in request.parts.items():
                _count(sums.setdefault(node, Account()), part, 1)
        assert sums == self._accounts, (sums, self._accounts)
        prefill: dict[Node, HashCounts] = {}
        decode: dict[Node, HashCounts] = {}
        for request in self._requests.values():
            for node, part in request.parts.items():
                _change(prefill, node, (), part.prefill_hashes)
                _change(decode, node, (), part.decode_hashes)
        assert (prefill, decode) == (self._prefill_hashes, self._decode_hashes)
        limited = {key: request for key, request in self._requests.items() if request.due is not None}
        assert self._limited == {
            node: {key: request.parts[node] for key, request in limited.items() if node in request.parts}
            for node in {node for request in limited.values() for node in request.parts}
        }

    # ---- parts and their sums ----

    def _take(self, request_id: str, node: Node) -> Part:
        """Take a part out of the account; `_put` must follow."""
        request = self._requests.setdefault(request_id, LiveRequest())
        part = request.parts.pop(node, None) or Part(request)
        self._note_limited(node, request_id)
        _count(self._accounts.setdefault(node, Account()), part, -1)
        return part

    def _put(self, request_id: str, node: Node, part: Part) -> None:
        account = self._accounts[node]
        if part.tokens_to_compute or part.is_decoded or part.tokens_outgoing:
            part.request.parts[node] = part
            self._note_limited(node, request_id)
            _count(account, part, 1)
        else:
            self._forget_hashes(node, part)
        if account == NOTHING:
            del self._accounts[node]

    def _hold(self, node: Node, part: Part, hashes: Sequence[int]) -> None:
        _change(self._decode_hashes, node, part.decode_hashes, hashes)
        part.decode_hashes = hashes

    def _forget_hashes(self, node: Node, part: Part) -> None:
        _change(self._prefill_hashes, node, part.prefill_hashes, ())
        part.prefill_hashes = ()
        self._hold(node, part, ())

    def _note_limited(self, node: Node, request_id: str) -> None:
        """Update the index of requests with an SLO after a part has come or gone."""
        request, limited = self._requests[request_id], self._limited
        if request.due is None:
            return
        self._uncounted.add(node)
        if node in request.parts:
            limited.setdefault(node, {})[request_id] = request.parts[node]
        elif node in limited:
            limited[node].pop(request_id, None)
            if not limited[node]:
                del limited[node]


def _change(hashes: dict[Node, HashCounts], node: Node, old: Sequence[int], new: Sequence[int]) -> None:
    """Replace the hashes of one part on a node."""
    if new:
        hashes.setdefault(node, HashCounts()).add(new)
    if old:
        hashes[node].remove(old)
        if not hashes[node]:
            del hashes[node]


def _count(account: Account, part: Part, sign: int) -> None:
    account.tokens_to_compute += sign * part.tokens_to_compute
    account.tokens_held += sign * part.tokens_held
    account.num_sequences += sign * part.is_decoded
    account.num_unprefilled += sign * (part.is_decoded and part.tokens_to_compute > 0)
    account.num_arriving += sign * part.is_arriving
    account.tokens_outgoing += sign * part.tokens_outgoing
