"""Define what a placement policy gets and what it returns. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from coordinator.control.load import NO_ARRIVALS, Arrivals, Ledger, Prompt
from coordinator.control.nodes import Node
from coordinator.control.placement.costs import TransferEstimates
from coordinator.control.request import PrefixFetch
from serving_core.slo import Due


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt asks for.

    prompt, num_tokens   the tokens to prefill, and the most tokens of prompt and output together
    avoid                nodes to choose last
    due                  planned deadlines; None without an SLO
    num_output           output tokens that have come before
    num_left             output tokens expected; None: all that num_tokens leaves room for
    arrivals             requests expected to arrive
    num_ahead            deferred requests per decode node, which get the next running slots first
    num_spare            running slots to leave free for requests that come back
    tpot_margin          factor by which TPOT rarely exceeded the planned one
    """

    prompt: Prompt
    num_tokens: int
    avoid: Collection[Node] = ()
    due: Due | None = None
    num_output: int = 0
    num_left: int | None = None
    arrivals: Arrivals = NO_ARRIVALS
    num_ahead: int = 0
    num_spare: int = 0
    tpot_margin: float = 1.0


class Placed(NamedTuple):
    """The prefill node and the decode node of a request: one node for both, or two with a KV transfer.

        num_late         requests with an SLO that are expected to miss it because of this one, itself included
        crowding         a step of all sequences on the decode node, as a multiple of their tightest limit on TPOT
        wait_s           seconds until the first token would be in time and there is room, or until this request and
                         those before it have running slots, as far as that is known
        prefill_s          seconds of the prefill itself
        begins_s         seconds until the prompt is prefilled; inf where no time is better
        least_prefill_s     the same, if prompts got all of the prefill node's time
        num_late_beside  late sequences on a crowded decode node, with this one
        prefix fetch             the remote prefix fetch
        queue_s          seconds of work queued on the prefill node; 0 where its rate is unknown
        is_full          the sequence has to wait for others to end

    The fields from num_late to num_late_beside are predicted only where some request has an SLO.
    """

    prefill_node: Node
    decode_node: Node
    num_late: int = 0
    crowding: float = 0.0
    wait_s: float = 0.0
    prefill_s: float = 0.0
    begins_s: float = 0.0
    least_prefill_s: float = 0.0
    num_late_beside: int = 0
    prefix_fetch: PrefixFetch | None = None
    queue_s: float = 0.0
    is_full: bool = False

    @property
    def is_timely(self) -> bool:
        """Return whether all sequences are expected to attain their SLOs beside this one."""
        return not self.num_late and self.crowding <= 1


class Policy(Protocol):
    """Choose the nodes of a request."""

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: TransferEstimates, now: float
    ) -> Placed:
        """Return the nodes for a request, and what the policy predicts there.

        Nodes that are full may be chosen too (see Placed.is_full). Raises RequestError if no pair of the ready nodes
        among these could hold the request, however idle.
        """
        ...


def within_pools(
    prefill_nodes: Sequence[Node], decode_nodes: Sequence[Node], wanted: Wanted
) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return the prefill nodes and the decode nodes whose own pools hold the request.

    A KV transfer goes from pool to pool, without KV holders.
    """
    some_prefill_nodes = [node for node in prefill_nodes if len(wanted.prompt) <= node.pool_tokens]
    return some_prefill_nodes, [node for node in decode_nodes if wanted.num_tokens <= node.pool_tokens]
