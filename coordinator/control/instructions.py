"""Define the instructions of the scheduler, and build them: commands to nodes, and the ends of requests. Pure.

Instructions are NamedTuples, because there is one for each token of each output.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final, NamedTuple

from coordinator.control.load import Prompt
from coordinator.control.nodes import Node
from coordinator.control.request import Death, Migration, Request, State, Timeline
from coordinator.control.slo import MS
from protos import fleet_pb2, inference_pb2
from protos.convert import due_to_wire, job_to_wire
from serving_core import reasons, requests
from serving_core.errors import RequestError
from serving_core.slo import Due


class Send(NamedTuple):
    """Send a command to a node."""

    node: Node
    command: fleet_pb2.NodeCommand


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one output, with their text: the fields of the proto's Chunk, which costs more."""

    first_token_index: int
    token_ids: list[int]
    text: str = ""
    logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
    prompt_logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
    cached_tokens: int | None = None
    finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def is_plain(self) -> bool:
        """Return whether the tokens are all there is."""
        has_logprobs = self.logprobs or self.prompt_logprobs
        return not (has_logprobs or self.text or self.finish_reason or self.cached_tokens is not None)

    def append(self, more: "Chunk") -> None:
        """Append the chunk that follows."""
        self.token_ids += more.token_ids
        self.text += more.text
        self.logprobs = [*self.logprobs, *more.logprobs]
        self.finish_reason = more.finish_reason


def chunk_of(tokens: Sequence[fleet_pb2.SampledToken], num_cached_tokens: int | None) -> Chunk:
    """Return consecutive tokens as a chunk without text.

    `num_cached_tokens` are the prompt tokens found in a prefix cache, with the first token of the output, else None.
    """
    first, last = tokens[0], tokens[-1]
    scored = [each for each in tokens if each.HasField("logprob")]
    return Chunk(
        first.index,
        [token.token_id for token in tokens],
        logprobs=[
            inference_pb2.TokenLogprobs(token_id=each.token_id, logprob=each.logprob, top=each.top) for each in scored
        ],
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=num_cached_tokens,
        finish_reason=last.finish_reason,
    )


class Emit(NamedTuple):
    """Emit the next tokens of an output, which follow those before without a gap."""

    request_id: str
    chunk: Chunk


class End(NamedTuple):
    """End a request with a Complete message, or with an error. There is exactly one per request."""

    request_id: str
    outcome: inference_pb2.Complete | RequestError
    timeline: Timeline
    ended_s: float


class MigrationOutcome(Enum):
    """How a migration ended; the values are labels of a metric."""

    MIGRATED = "migrated"
    REFUSED = "refused"  # the target had no room or was lost; the source knows nothing
    FAILED = "failed"  # the KV did not arrive; the source decodes on
    ENDED = "ended"  # the request ended first, or was restarted on other nodes


class MigrationEnded(NamedTuple):
    """Record the end of a migration, once for each. Nothing is to be sent."""

    request_id: str
    source: Node
    target: Node
    outcome: MigrationOutcome
    started_s: float  # when Reserve was sent to the target
    ended_s: float
    num_kv_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


Instruction = Send | Emit | End | MigrationEnded


def migration_ended(
    request: Request, migration: Migration, outcome: MigrationOutcome, now: float, num_kv_bytes: int = 0
) -> MigrationEnded:
    """Return the record of a migration for the request log."""
    return MigrationEnded(
        request.request_id, migration.source, migration.target, outcome, migration.started_s, now, num_kv_bytes
    )


# ---- commands to nodes ----


def describe_sender(reserve: fleet_pb2.Reserve, sender: Node) -> None:
    """Set the tensor-parallel size, the pipeline-parallel size and the KV keys of the sending node in a Reserve."""
    reserve.prefill_tp_size, reserve.prefill_pp_size = sender.tp_size, sender.pp_size
    reserve.sender_keys.extend(sender.hello.kv_keys)


def job_of(request: Request, epoch: int, prompt: Prompt, now: float) -> fleet_pb2.Job:
    """Return the Job that describes one attempt (`epoch`) of a request to a node; `prompt` are the tokens to prefill.

    Deadlines in it are seconds from `now`.
    """
    node_request = requests.Request(
        request_id=request.request_id,
        epoch=epoch,
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(request.prompt),
        sampling=request.sampling,
        cache_salt=prompt.cache_salt,
        adapter=prompt.adapter,
        pooling=request.pooling,
    )
    due = request.due
    if request.is_late and due is not None and now > due.first_s and not request.output:
        due = Due(math.inf, due.tpot_s)  # the first token is late: nodes need not hurry
    due_left = due_to_wire(due, now) if due else None
    return job_to_wire(
        node_request,
        request.age,
        due_left,
        request.priority,
        is_suspect=bool(request.deaths),
        asker=request.asker,
    )


def start_commands(request: Request, prompt: Prompt, now: float) -> Iterator[Send]:
    """Yield the commands that start the current attempt on its nodes: Reserve to decode, then Prefill to prefill.

    One command where one node does both, or for an embedding. `prompt` is the attempt's whole prompt, with the tokens
    that earlier attempts have generated.
    """
    attempt = request.attempt
    job = job_of(request, attempt.epoch, prompt, now)
    to_prefill = fleet_pb2.NodeCommand(attempt=job.attempt)
    if request.pooling is not None:
        to_prefill.prefill.job.CopyFrom(job)
        yield Send(attempt.prefill, to_prefill)
        return
    to_decode = fleet_pb2.NodeCommand(attempt=job.attempt)
    to_decode.reserve.job.CopyFrom(job)  # filled in place: each copy copies the whole prompt
    if attempt.is_local:
        to_decode.reserve.local_prefill = True
        _offer_prefix_fetch(request, to_decode.reserve.job)
        to_decode.reserve.job.kv_holders.extend([node.hello.remote_kvs.holder for node in attempt.kv_holders])
        yield Send(attempt.decode, to_decode)
        return
    describe_sender(to_decode.reserve, attempt.prefill)
    yield Send(attempt.decode, to_decode)
    to_prefill.prefill.job.CopyFrom(job)
    _offer_prefix_fetch(request, to_prefill.prefill.job)
    yield Send(attempt.prefill, to_prefill)


def _offer_prefix_fetch(request: Request, job: fleet_pb2.Job) -> None:
    if request.attempt.prefix_fetch is not None:
        job.fetch_prefix.CopyFrom(request.attempt.prefix_fetch.to_wire())


def keep(request: Request) -> Send:
    """Return the command by which the node of the current attempt decodes the request itself, and sends no KV."""
    about = fleet_pb2.Attempt(request_id=request.request_id, epoch=request.attempt.epoch)
    return Send(request.attempt.decode, fleet_pb2.NodeCommand(keep=fleet_pb2.Keep(attempt=about), attempt=about))


def begun(request: Request) -> Send:
    """Return the command that informs the decode node, which lacks the KV, that the first token is sampled."""
    about = fleet_pb2.Attempt(request_id=request.request_id, epoch=request.attempt.epoch)
    return Send(request.attempt.decode, fleet_pb2.NodeCommand(begun=fleet_pb2.Begun(attempt=about), attempt=about))


RESEND_S: Final = 5.0


@dataclass(slots=True)
class _Release:
    node: Node
    attempt: fleet_pb2.Attempt
    sent_s: float


NUM_EPOCHS: Final = 2**32


class Releases:
    """Number the attempts, and repeat each Cancel every RESEND_S until the node has confirmed it or is lost."""

    def __init__(self, first_epoch: int) -> None:
        self._epoch = first_epoch
        self.requests: dict[int, Request] = {}  # that have not ended, by the epochs of all their attempts
        self._releases: dict[tuple[Node, int], _Release] = {}  # epochs are never used twice

    def __len__(self) -> int:
        return len(self._releases)

    def next_epoch(self, request: Request) -> int:
        """Return an epoch that no earlier attempt of any request has; it is the request's until `forget`."""
        self._epoch = (self._epoch + 1) % NUM_EPOCHS
        self.requests[self._epoch] = request
        request.epochs.append(self._epoch)
        return self._epoch

    def forget(self, request: Request) -> None:
        """Remove an ended request from `requests`."""
        for epoch in request.epochs:
            del self.requests[epoch]

    def cancel(self, request: Request, node: Node, epoch: int, now: float) -> Send:
        """Return the Cancel of the attempt `epoch` on a node, and repeat it in `overdue` until `settle`."""
        release = _Release(node, fleet_pb2.Attempt(request_id=request.request_id, epoch=epoch), now)
        self._releases[node, epoch] = release
        return _cancel(release)

    def cancel_attempt(self, request: Request, now: float) -> list[Send]:
        """Return the Cancels of the current attempt for every node that may hold something of it.

        Afterwards the attempt counts as held by no node.
        """
        attempt, fetch = request.attempt, request.attempt.prefix_fetch
        cancels = [self.cancel(request, node, attempt.epoch, now) for node in attempt.holders]
        is_fetching = fetch is not None and not fetch.has_begun and request.state is State.PREFILLING
        if fetch is not None and is_fetching and attempt.prefill in attempt.holders:  # else its blocks stay reserved
            cancels.append(self.cancel(request, attempt.prefill, fetch.epoch, now))
        attempt.holders = []
        return cancels

    def settle(self, node: Node, epoch: int) -> bool:
        """Stop repeating the Cancel of an attempt, which the node has released. Return False if there was no Cancel."""
        return self._releases.pop((node, epoch), None) is not None

    def count(self, node: Node) -> int:
        """Return the number of attempts that the node has yet to release."""
        return sum(release.node is node for release in self._releases.values())

    def lose(self, node: Node) -> None:
        self._releases = {key: release for key, release in self._releases.items() if release.node is not node}

    def overdue(self, now: float) -> list[Send]:
        """Return the Cancels that were sent RESEND_S ago or more and not confirmed; they count as sent at `now`."""
        late = [release for release in self._releases.values() if now - release.sent_s >= RESEND_S]
        for release in late:
            release.sent_s = now
        return [_cancel(release) for release in late]


def _cancel(release: _Release) -> Send:
    cancel = fleet_pb2.Cancel(attempt=release.attempt)
    return Send(release.node, fleet_pb2.NodeCommand(cancel=cancel, attempt=release.attempt))


# ---- ends ----

MAX_MESSAGE_CHARS: Final = 200
MAX_BYTES: Final = 2**64 - 1  # largest uint64
# As OpenAI's API and the labels of metrics spell them.
FINISH_REASONS: Final = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}
# A node's message with one of these reasons is passed to the client unchanged.
CLIENT_REASONS: Final = (reasons.QUEUE_FULL, reasons.PROMPT_TOO_LONG, reasons.BAD_PARAM, reasons.MODEL_NOT_FOUND)


def completion(request: Request, finish_reason: inference_pb2.FinishReason, now: float) -> inference_pb2.Complete:
    """Return the Complete message of a request that ends now."""
    attempt = request.attempt if request.is_on_nodes else None
    timeline = request.timeline.to_wire(
        now,
        prefill_node=attempt.prefill.name if attempt else "",
        decode_node=attempt.decode.name if attempt and request.pooling is None else "",
        num_restarts=request.num_restarts,
        num_migrations=request.num_migrations,
        migration_pause_s=request.migration_pause_s,
        prefix_fetch_s=request.prefix_fetch_s,
        is_late=request.is_late,
        **(asdict(request.expectation) if request.expectation else {}),
    )
    return inference_pb2.Complete(
        finish_reason=finish_reason,
        prompt_tokens=len(request.prompt),
        completion_tokens=len(request.output),
        cached_tokens=request.num_cached_tokens,
        timeline=timeline,
        kv_bytes=min(request.num_kv_bytes, MAX_BYTES),
        kv_bytes_saved=min(request.num_kv_bytes_saved, MAX_BYTES),
        migrated_kv_bytes=min(request.num_migrated_kv_bytes, MAX_BYTES),
        fetched_kv_bytes=min(request.num_fetched_kv_bytes, MAX_BYTES),
        attainment=attainment(request),
        resumed_tokens=request.num_resumed,
        proposed_tokens=request.num_proposed,
        accepted_tokens=request.num_accepted,
    )


def ended_before(request: Request, finish_reason: inference_pb2.FinishReason, now: float) -> inference_pb2.Complete:
    """Return the Complete message of a resumed request whose last token the client already has.

    The earlier call has broken off before its end was sent.
    """
    complete = completion(request, finish_reason, now)
    if finish_reason == inference_pb2.FINISH_REASON_STOP:
        complete.matched_token_id = request.output[-1]
    return complete


def cut_short(error: RequestError, timeline: Timeline, now: float) -> inference_pb2.Complete:
    """Return the Complete message, with its error, of a sequence that failed while others of its call continue."""
    return inference_pb2.Complete(
        finish_reason=inference_pb2.FINISH_REASON_ABORT,
        completion_tokens=int(error.metadata.get("tokens_emitted", "0")),
        timeline=timeline.to_wire(now),
        error=str(error)[:MAX_MESSAGE_CHARS],
    )


def attainment(request: Request) -> inference_pb2.Attainment | None:
    """Return the SLO of a request and which limits it attains; None without limits and without an SLO class.

    An embedding counts as a first token.
    """
    slo, timeline = request.slo, request.timeline
    if slo is None or not (slo.has_limits or slo.slo_class):
        return None
    first_s = timeline.ttft_s if timeline.first_token_s is not None else math.inf
    if request.embedded_s is not None:
        first_s = request.embedded_s - timeline.start_s
    attained = inference_pb2.Attainment(slo_class=slo.slo_class)
    if slo.ttft_s is not None:
        attained.ttft_ms = slo.ttft_s * MS
        attained.ttft_met = first_s <= slo.ttft_s
    if slo.tpot_s is not None:
        attained.tpot_ms = slo.tpot_s * MS
        attained.tpot_met = first_s < math.inf and timeline.tpot_s(len(request.output)) <= slo.tpot_s
    return attained


def end_error(node: Node, event: fleet_pb2.Failed) -> RequestError:
    """Return the error to send to the client when a node's failure ends the request at once."""
    if event.reason in CLIENT_REASONS:
        return RequestError(event.reason, event.message[:MAX_MESSAGE_CHARS])
    if event.reason == reasons.PAIRING_MISMATCH:
        differ = f"node {node.name} and the coordinator differ: {event.message[:MAX_MESSAGE_CHARS]}"
        return RequestError(event.reason, differ)
    failed = f"the engine of the {node.kind} failed"
    if event.reason in (reasons.STEP_FAILED, reasons.ENGINE_ERROR):  # the node words the cause of these for clients
        failed += f": {event.message[:MAX_MESSAGE_CHARS]}"
    return RequestError(reasons.ENGINE_ERROR, failed)


def quarantine_error(deaths: Sequence[Death]) -> RequestError:
    """Return the error to send to the client for a poison request, which is not tried again.

    `deaths` are the failures of nodes that computed it.
    """
    causes = "; ".join(dict.fromkeys(death.cause for death in deaths))
    return RequestError(
        reasons.ENGINE_ERROR,
        f"nodes were lost or failed {len(deaths)} times in a row while they computed the request, "
        f"and it is not tried again: {causes}",
    )


def restart_error(node: Node, event: fleet_pb2.Failed) -> RequestError:
    """Return the error to send to the client when a node has failed the request and no restart is left."""
    if event.reason == reasons.KV_CHECKSUM_MISMATCH:
        return RequestError(
            reasons.KV_CHECKSUM_MISMATCH, "the KV cache arrived damaged, and recomputing it was given up"
        )
    return RequestError(reasons.WORKER_LOST, f"the {node.kind} gave the request up: its KV could not be transferred")


def too_late(request: Request) -> RequestError:
    """Return the error to send to the client for a request that has reached its deadline."""
    timeout_s = request.deadline_s - request.timeline.start_s
    error = RequestError(reasons.DEADLINE_EXCEEDED, f"the request was not finished within {timeout_s:g} s")
    return with_progress(error, request)


def with_progress(error: RequestError, request: Request) -> RequestError:
    """Return the error with the request's phase and the number of its emitted tokens added to the metadata."""
    progress = {"phase": request.timeline.phase.value, "tokens_emitted": str(len(request.output))}
    return RequestError(error.reason, str(error), **error.metadata | progress)


def with_expectation(error: RequestError, request: Request, **seconds: float) -> RequestError:
    """Return the refusal with the predictions for the request, and `seconds` by name, added to its metadata."""
    expected = {**(asdict(request.expectation) if request.expectation else {}), **seconds}
    return RequestError(error.reason, str(error), **error.metadata, **{key: f"{expected[key]:.6f}" for key in expected})
