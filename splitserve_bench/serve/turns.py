"""Follow the turns of sessions in a closed loop: what is sent once other requests have ended. Pure.

A turn continues an earlier request: that request's prompt and output come before its own prompt, as the server sent the
output. Where a turn fails, the turns of its session that wait for it are not sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from splitserve_bench.serve.records import CHATS, Outcome, PlannedRequest, Reply, RequestFailed, bounded


@dataclass(frozen=True, slots=True)
class Ended:
    """A request as it was sent, and its output: None where it failed."""

    request: PlannedRequest
    token_ids: Sequence[int] | None
    text: str = ""


class Turns:
    """Hold the requests of a load that wait for others, and the outputs that they continue."""

    def __init__(self, planned: Iterable[PlannedRequest]) -> None:
        """Read the load. A request comes after those that it waits for."""
        self.first: list[PlannedRequest] = []  # requests that wait for none
        self._waiting: dict[int, PlannedRequest] = {}
        self._followers: dict[int, list[int]] = {}
        self._num_missing: dict[int, int] = {}
        self._continued: dict[int, Ended] = {}
        self._num_continuing: dict[int, int] = {}
        self._failed: dict[int, PlannedRequest] = {}
        for request in planned:
            if not request.after:
                self.first.append(request)
                continue
            self._waiting[request.index], self._num_missing[request.index] = request, len(request.after)
            for index in request.after:
                self._followers.setdefault(index, []).append(request.index)
            if request.continues is not None:
                self._num_continuing[request.continues] = self._num_continuing.get(request.continues, 0) + 1

    def check(self, request: PlannedRequest, reply: Reply) -> None:
        """Raise RequestFailed for a complete output that another turn continues, and whose tokens are not known."""
        is_continued = request.index in self._num_continuing and not request.text
        num_tokens = reply.num_arrived_tokens if reply.num_output_tokens is None else reply.num_output_tokens
        if is_continued and len(reply.token_ids) != num_tokens:
            raise RequestFailed(
                f"the server sent {len(reply.token_ids)} token ids of an output of {num_tokens} tokens, which the next "
                f"turn continues: it needs return_token_ids of vLLM, or --endpoint /v1{CHATS}"
            )

    def ended(self, ended: Ended, now_s: float) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
        """Return the requests that may be sent now that one has ended, with their times, and those that never will be.

        Both have the prompts that a server gets.
        """
        ready: list[PlannedRequest] = []
        dropped: list[PlannedRequest] = []
        over = [ended]
        while over:
            each = over.pop(0)
            index, has_failed = each.request.index, each.token_ids is None
            if not has_failed and index in self._num_continuing:
                self._continued[index] = each
            for follower in self._followers.pop(index, ()):
                request = self._waiting[follower]
                if has_failed and request.session == each.request.session:
                    self._failed[follower] = each.request
                self._num_missing[follower] -= 1
                if self._num_missing[follower]:
                    continue
                request = replace(self._composed(self._waiting.pop(follower)), send_at_s=now_s + request.gap_s)
                if self._failed.pop(follower, None) is None:
                    ready.append(request)
                else:
                    dropped.append(request)
                    over.append(Ended(request, None))
        return ready, dropped

    def _composed(self, request: PlannedRequest) -> PlannedRequest:
        """Return the request with what it continues before its prompt."""
        if request.continues is None:
            return request
        before = self._continued.get(request.continues)
        self._num_continuing[request.continues] -= 1
        if not self._num_continuing[request.continues]:
            self._continued.pop(request.continues, None)
        if before is None:  # it failed
            return request
        return replace(
            request,
            prompt=(*before.request.prompt, *(before.token_ids or ()), *request.prompt),
            messages=(*before.request.messages, before.request.text, before.text) if request.text else (),
        )


def not_sent(request: PlannedRequest, now_s: float) -> Outcome:
    """Return the outcome of a turn that is not sent because one before it has failed."""
    return Outcome(
        index=request.index,
        scheduled_s=now_s,
        sent_s=now_s,
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=0,
        arrivals_s=(),
        arrival_tokens=(),
        ended_s=now_s,
        error=bounded("not sent, since an earlier turn of its session failed"),
        session=request.session,
        turn=request.turn,
    )


def longest_s(planned: Iterable[PlannedRequest], each_s: float) -> float:
    """Return when the last request of a load has ended at the latest, if each takes `each_s` seconds."""
    ends_s: dict[int, float] = {}
    for request in planned:
        sent_s = max([ends_s[index] for index in request.after], default=request.send_at_s) + request.gap_s
        ends_s[request.index] = sent_s + each_s
    return max(ends_s.values(), default=0.0)
