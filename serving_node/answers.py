"""What a step gives to each request, put down and told: tokens, an embedding, or why there is neither. Pure."""

from collections.abc import Sequence

from protos import convert, fleet_pb2
from serving_core.leases import Leases
from serving_core.requests import SampledToken, finish_reason
from serving_core.residents import Resident, Residents, Stage
from serving_node.cache_report import CacheReport
from serving_node.endings import Endings


class Answers:
    """The answers of one node's requests."""

    def __init__(
        self,
        residents: Residents,
        leases: Leases,
        endings: Endings,
        cache_report: CacheReport,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._residents = residents
        self._leases = leases
        self._endings = endings
        self._cache_report = cache_report
        self._eos_token_ids = eos_token_ids

    def take(
        self,
        resident: Resident,
        tokens: Sequence[SampledToken],
        step_tokens: fleet_pb2.StepTokens,
        num_candidates: int,
        now: float,
    ) -> bool:
        """The tokens of a request that a step has given: a first one is told at once, others are put into
        `step_tokens`. The KV of all but the last is there: they were candidates, none of which ends an answer. Tells
        whether the last one does."""
        has_ended, told = False, step_tokens.tokens
        num_before = len(told)
        for index, token in enumerate(tokens):
            if index:
                resident.num_computed += 1
                self._leases.publish(resident)
            if token.is_token:
                has_ended = self._take_one(resident, token, step_tokens, now)
        if num_candidates and len(told) > num_before:
            told[-1].num_proposed, told[-1].num_accepted = num_candidates, len(told) - num_before - 1
        return has_ended

    def _take_one(self, resident: Resident, token: SampledToken, step_tokens: fleet_pb2.StepTokens, now: float) -> bool:
        """One more token of a request; what was cancelled meanwhile says nothing. Tells whether it is the last."""
        request, is_first = resident.request, resident.computes_prompt
        request.token_ids.append(token.token_id)
        resident.has_first_token = True
        reason = finish_reason(request, self._eos_token_ids)
        if is_first or reason is not None:
            self._cache_report.tell()  # before the client can ask again
        if is_first:
            resident.note_begun(now)
        if not resident.is_ending and is_first:
            first_token = self._first_token(resident, now)
            convert.tell_token(first_token.token, request, token, reason)
            convert.tell_scores(first_token.token, request.scores)
            self._endings.tell(first_token=first_token)
        elif not resident.is_ending:
            convert.tell_token(step_tokens.tokens.add(), request, token, reason)
        if resident.stage is not Stage.WRITING and not resident.hands_over:
            self._residents.enter(resident, Stage.WRITING)
        elif resident.hands_over and reason is None:
            resident.tail = [token.token_id]
        return reason is not None

    def end_without_token(self, resident: Resident, last: SampledToken, now: float) -> None:
        """Ends a request whose last token is none: the embedding of the prompt was all that was wanted, or it has
        failed."""
        if last.embedding:
            self._end_embedded(resident, last, now)
        elif last.error is not None:
            self._endings.fail(resident, last.error.reason, str(last.error))

    def _end_embedded(self, resident: Resident, token: SampledToken, now: float) -> None:
        assert resident.reading_since_s is not None
        embedded = fleet_pb2.Embedded(
            attempt=convert.attempt_of(resident.request),
            embedding=token.embedding,
            prefill_s=now - resident.reading_since_s,
            num_cached_tokens=self._leases.num_cached_tokens(resident),
        )
        self._cache_report.tell()  # before the client can ask again
        self._endings.end(resident, embedded=embedded)

    def _first_token(self, resident: Resident, now: float) -> fleet_pb2.FirstToken:
        """Without the token."""
        assert resident.reading_since_s is not None
        return fleet_pb2.FirstToken(
            attempt=convert.attempt_of(resident.request),
            prefill_s=now - resident.reading_since_s,
            num_cached_tokens=self._leases.num_cached_tokens(resident),
        )
