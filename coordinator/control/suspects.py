"""Which requests a node may have died of. Pure."""

from collections.abc import Iterable, Iterator
from typing import Final

from coordinator.control.attempts import TrackedRequest
from coordinator.control.registry import Node

# As many nodes as may die in a row of a request that comes no further.
MAX_DEATHS: Final = 2


def at_work(node: Node, requests: Iterable[TrackedRequest]) -> Iterator[TrackedRequest]:
    """Those that the node's last step may have been about, of requests in order of age: all answers that it wrote, and
    the oldest of its prompts, as many as a step holds beside the rest of the first."""
    num_ahead, most = 0, node.shape.prompt_tokens or node.hello.max_num_batched_tokens
    has_prompt = False
    for request in requests:
        attempt = request.attempt
        if attempt.has_first_token:
            if node is attempt.decode and attempt.is_committed:
                yield request
        elif node is attempt.prefill and num_ahead < most:
            if request.may_have_come:
                yield request
            num_ahead += len(request.prompt) + len(request.output) if has_prompt else 0
            has_prompt = True
