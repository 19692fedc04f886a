"""Report the tokens of each step and the changes of the prefix cache, and count steps. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from protos import convert, fleet_pb2
from serving_core.figures import BATCH, Histogram
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepLoad
from serving_core.node.leases import Leases
from serving_core.node.prefix import hint_of
from serving_core.node.requests import NodeRequest, NodeRequests, RequestEvent, RequestState
from serving_core.node.tiers import TierIndex
from serving_core.requests import FinishReason, SampledToken, Work, finish_reason
from serving_node.transfers import Endings

MAX_HINTS: Final = 2**16  # of each kind in one message


class CacheReport:
    """Reports the prefix cache of one node and its changes to the coordinator."""

    def __init__(
        self,
        allocator: BlockAllocator,
        tier: TierIndex | None,
        numerics_ids: Sequence[bytes],
        report: Callable[..., None],
    ) -> None:
        """Create a report.

        `tier` is the index of KV offload, if there is any. `numerics_ids` are the numerics ids that blocks of the pool
        may have, in lookup order. `report` takes the event.
        """
        self._allocator = allocator
        self._tier = tier
        self._numerics_ids = numerics_ids
        self._report = report
        self._is_known = False  # whether the coordinator has the earlier reports

    def forget(self) -> None:
        """Report the whole cache next time: the coordinator is a new one or has dropped its knowledge."""
        self._is_known = False

    def _names(self) -> list[bytes]:
        in_pool = self._allocator.take_names()
        return in_pool if self._tier is None else list(dict.fromkeys([*in_pool, *self._tier.take_names()]))

    def _changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the block hashes added to and removed from pool and KV offload together.

        A block that goes from one to the other stays held.
        """
        stored, removed = self._allocator.take_changes()
        if self._tier is None:
            return stored, removed
        put, dropped = self._tier.take_changes()
        in_pool, tier = self._allocator.blocks_by_name, self._tier
        is_held = {name: name in in_pool or name in tier for name in (*stored, *put, *removed, *dropped)}
        new = [name for name in dict.fromkeys([*stored, *put]) if is_held[name]]
        return new, [name for name in dict.fromkeys([*removed, *dropped]) if not is_held[name]]

    def report(self) -> None:
        """Report the changes since the last report, if any, or the whole cache if the coordinator knows nothing.

        A cache without blocks is then reported too: it tells the coordinator that requests share blocks.
        """
        is_first, self._is_known = not self._is_known, True
        stored, removed = (self._names(), []) if is_first else self._changes()
        removals, additions = list(_parts(removed)), list(_parts(stored))
        if is_first and self._allocator.caching:
            additions = additions or [[]]
        together = [(removals.pop(), additions.pop(0))] if removals and additions else []
        for gone, new in (*((part, []) for part in removals), *together, *(([], part) for part in additions)):
            self._report(
                cache_changed=fleet_pb2.CacheChanged(removed=gone, stored=new, numerics_ids=self._numerics_ids)
            )


def _parts(names: list[bytes]) -> Iterator[list[int]]:
    for first in range(0, len(names), MAX_HINTS):
        yield list(map(hint_of, names[first : first + MAX_HINTS]))


class Outputs:
    """Records and reports the output tokens of one node's requests."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        endings: Endings,
        cache_report: CacheReport,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._endings, self._decisions = endings, endings.decisions
        self._cache_report = cache_report
        self._eos_token_ids = eos_token_ids

    def take(
        self,
        node_requests: Sequence[NodeRequest],
        works: Sequence[Work],
        given: Sequence[Sequence[SampledToken]],
        step_tokens: fleet_pb2.StepTokens,
        now: float,
    ) -> list[NodeRequest]:
        """Record the tokens that a step gave each request; return the requests whose output ends with them.

        `given[i]` are the tokens of `node_requests[i]`, whose scheduled tokens are `works[i]`. A first token is
        reported at once; others are added to `step_tokens`.
        """
        ended: list[NodeRequest] = []
        for node_request, work, tokens in zip(node_requests, works, given, strict=True):
            if work.draft_tokens:
                has_ended = self._take_drafted(node_request, tokens, step_tokens, len(work.draft_tokens), now)
            else:
                has_ended = bool(tokens) and self._take_one(node_request, tokens[0], step_tokens, now)
            if has_ended:
                ended.append(node_request)
        return ended

    def _take_drafted(
        self,
        node_request: NodeRequest,
        tokens: Sequence[SampledToken],
        step_tokens: fleet_pb2.StepTokens,
        num_draft_tokens: int,
        now: float,
    ) -> bool:
        """Record the tokens of a request with draft tokens. The KV of all but the last token is computed: they were
        draft tokens, none of which ends the output.
        """
        has_ended, reported = False, step_tokens.tokens
        num_before = len(reported)
        for index, token in enumerate(tokens):
            if index:
                node_request.num_computed += 1
                self._leases.publish(node_request)
            has_ended = self._take_one(node_request, token, step_tokens, now, is_plain=False)
        if len(reported) > num_before:
            reported[-1].num_proposed, reported[-1].num_accepted = num_draft_tokens, len(reported) - num_before - 1
        return has_ended

    def _take_one(
        self,
        node_request: NodeRequest,
        token: SampledToken,
        step_tokens: fleet_pb2.StepTokens,
        now: float,
        *,
        is_plain: bool = True,
    ) -> bool:
        """Record one token of a request; a cancelled request reports nothing. Return whether it is the last token.

        `is_plain`: no draft tokens were verified for it.
        """
        if token.error is not None or token.embedding:
            return False  # no token
        request = node_request.request
        request.token_ids.append(token.token_id)
        reason = finish_reason(request, self._eos_token_ids)
        if not node_request.has_first_token:
            self._take_first(node_request, token, reason, now)
        else:
            if reason is not None:
                self._cache_report.report()  # before the client can send its next request
            if node_request.ending is None:
                if is_plain:
                    convert.add_token(step_tokens, request, token, reason)
                else:
                    convert.fill_token(step_tokens.tokens.add(), request, token, reason)
        if node_request.state is not RequestState.RUNNING:
            self._prefilled(node_request, token, reason)
        return reason is not None

    def _take_first(
        self, node_request: NodeRequest, token: SampledToken, reason: FinishReason | None, now: float
    ) -> None:
        node_request.has_first_token = True
        self._cache_report.report()  # before the client can send its next request
        node_request.note_first_token(now)
        if node_request.ending is None:
            first_token = self._first_token(node_request, now)
            convert.fill_token(first_token.token, node_request.request, token, reason)
            convert.fill_prompt_logprobs(first_token.token, node_request.request.scores)
            self._decisions.report(first_token=first_token)

    def _prefilled(self, node_request: NodeRequest, token: SampledToken, reason: FinishReason | None) -> None:
        """Take a request whose prompt is computed to its next state, unless another node decodes it."""
        if not node_request.only_prefills:
            self._node_requests.apply(node_request, RequestEvent.SAMPLED)
            return
        assert node_request.outgoing is not None
        if reason is None:
            node_request.outgoing.tail = [token.token_id]

    def end_without_token(self, node_request: NodeRequest, last: SampledToken, now: float) -> None:
        """End a request whose step gave no token but `last`: the prompt's embedding, or an error."""
        if last.embedding:
            self._end_embedded(node_request, last, now)
        elif last.error is not None:
            self._endings.fail(node_request, last.error.reason, str(last.error))

    def _end_embedded(self, node_request: NodeRequest, token: SampledToken, now: float) -> None:
        assert node_request.prefill_began_s is not None
        embedded = fleet_pb2.Embedded(
            attempt=convert.attempt_of(node_request.request),
            embedding=token.embedding,
            prefill_s=now - node_request.prefill_began_s,
            num_cached_tokens=self._leases.num_cached_tokens(node_request),
        )
        self._cache_report.report()  # before the client can send its next request
        self._endings.end(node_request, embedded=embedded)

    def _first_token(self, node_request: NodeRequest, now: float) -> fleet_pb2.FirstToken:
        """Return the event of the first token, without the token."""
        assert node_request.prefill_began_s is not None
        return fleet_pb2.FirstToken(
            attempt=convert.attempt_of(node_request.request),
            prefill_s=now - node_request.prefill_began_s,
            num_cached_tokens=self._leases.num_cached_tokens(node_request),
        )


PHASES: Final = ("prefill", "decode", "mixed")


class StepCounts:
    """Counts and times of all successful steps of one node."""

    def __init__(self) -> None:
        self.seconds = {phase: Histogram() for phase in PHASES}
        self.tokens = Histogram(BATCH)  # prompt tokens and output tokens
        self.sequences = Histogram(BATCH)
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0

    def add(self, load: StepLoad, step_s: float, num_more: int = 0) -> None:
        """Count a finished step of this load and `step_s` seconds.

        `num_more` is the number of output tokens beyond one for each sequence.
        """
        num_prompt_tokens, num_sequences = load.num_prompt_tokens, load.num_sequences
        num_output_tokens = num_sequences + num_more
        phase = "decode" if not num_prompt_tokens else "mixed" if num_sequences else "prefill"
        self.seconds[phase].observe(step_s)
        self.tokens.observe(num_prompt_tokens + num_output_tokens)
        self.sequences.observe(num_sequences)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens
