"""Admit the requests that commands bring, if this node can do its part of them. Pure."""

from collections.abc import Mapping

from decode_node.credit import Credit
from prefill_node.reading import Reading
from protos import convert, fleet_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.model_files.adapter_names import adapter_key
from serving_core.node.prefix import BlockNames, root_name
from serving_core.node.requests import (
    DecodePlace,
    Distributed,
    Host,
    Incoming,
    NodeRequest,
    NodeRequests,
    Offer,
    RequestState,
    Waiting,
)


class Arrivals:
    """Admit requests to one node."""

    def __init__(
        self,
        node_requests: NodeRequests,
        reading: Reading,
        credit: Credit,
        fingerprint: Mapping[str, str],
        block_size: int,
        *,
        holds_remote_kv: bool,
    ) -> None:
        self._node_requests = node_requests
        self._reading = reading
        self._credit = credit
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._holds_remote_kv = holds_remote_kv

    def take_in(self, job: fleet_pb2.Job, now: float, reserve: fleet_pb2.Reserve | None = None) -> NodeRequest:
        """Add a request, for prefill for another node or, with `reserve`, for decode here.

        Raises RequestError, and then the request is not added.
        """
        request = convert.request_from_wire(job)
        is_prefilled_here = reserve is None or reserve.local_prefill
        if request.adapter and adapter_key(request.adapter) not in self._fingerprint:
            raise RequestError(reasons.MODEL_NOT_FOUND, f"no node has an adapter {request.adapter!r} any more")
        if self._node_requests.find(request) is not None:
            message = f"attempt {request.epoch} of the request was announced twice"
            raise RequestError(reasons.DUPLICATE_REQUEST_ID, message)
        hosts = tuple(Host(each.address, each.key) for each in job.hosts) if self._holds_remote_kv else ()
        num_ahead = 0
        if reserve is not None:
            num_to_come = request.sampling.max_tokens - request.num_output_tokens
            self._credit.check(len(request.token_ids) + num_to_come, may_grow_out=bool(hosts))
            num_ahead = min(reserve.num_tokens_ahead, num_to_come)
        if is_prefilled_here:
            self._reading.check(len(request.token_ids), may_grow_out=bool(hosts))
        node_request = NodeRequest(
            request,
            job.age,
            BlockNames(root_name(self._fingerprint, request.cache_salt, request.adapter), self._block_size),
            RequestState.WAITING if is_prefilled_here else RequestState.WAITING_FOR_BLOCKS,
            DecodePlace.ELSEWHERE if reserve is None else DecodePlace.HERE,
            due=convert.due_from_wire(job.due, now) if job.HasField("due") else None,
            priority=job.priority,
            waiting=Waiting(_offer(job)) if is_prefilled_here else None,
            incoming=None if is_prefilled_here or reserve is None else _incoming(reserve, num_ahead, now),
            distributed=Distributed(hosts) if hosts else None,
        )
        self._node_requests.add(node_request)
        return node_request


def _offer(job: fleet_pb2.Job) -> Offer | None:
    if not job.HasField("fetch_prefix"):
        return None
    fetch = job.fetch_prefix
    return Offer(fetch.epoch, fetch.num_tokens, max(1, fetch.tp_size), max(1, fetch.pp_size), fetch.patience_s)


def _incoming(reserve: fleet_pb2.Reserve, num_ahead: int, now: float) -> Incoming:
    source_tp, source_pp = max(1, reserve.prefill_tp_size), max(1, reserve.prefill_pp_size)
    return Incoming(now, source_tp, source_pp, num_ahead, reserve.is_whole)
