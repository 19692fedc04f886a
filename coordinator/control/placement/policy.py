"""What decides on which nodes a request is served. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Node
from coordinator.control.request import Loan
from coordinator.control.transfer_costs import HandoverCosts
from serving_core.due import Due


class Coming(NamedTuple):
    """New requests with a limit on their first token: so many a second, lately, and how many tokens each has to
    compute, in the mean."""

    per_s: float
    num_tokens: float


NOTHING_COMES: Final = Coming(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt asks for: the prompt that it begins with, and room for num_tokens, those of prompt and answer
    together. Nodes of `avoid` come last. num_output tokens of the answer are there already, and num_left are expected
    at most; None: all that there is room for. `coming` is what else is to be read. num_ahead are held for each node
    that writes, and get its next running slots first; num_spare running slots are to be left for who comes. TPOT rarely
    exceeded tpot_margin times what was planned, lately."""

    prompt: Prompt
    num_tokens: int
    avoid: Collection[Node] = ()
    due: Due | None = None
    num_output: int = 0
    num_left: int | None = None
    coming: Coming = NOTHING_COMES
    num_ahead: int = 0
    num_spare: int = 0
    tpot_margin: float = 1.0


class Placed(NamedTuple):
    """The node that reads the prompt and the node that writes the answer: the same one, or two with a hand-over.

    num_late: how many of all answers with limits are expected to miss one because of it, itself among them; crowding: a
    step of the answers on the node that writes, this one's too, by the tightest of their limits on TPOT; wait_s:
    seconds after which its first token would be in time, and there is room, or those before it and it have found
    running slots, as far as that is known; reads_s: seconds that its prompt takes by itself; begins_s: seconds after
    which it is read, inf where no time is better for it; least_read_s: the same if prompts got all of the reader's
    time; num_late_beside: how many answers are late, with it, on a node that is crowded. All these are worked out where
    somebody has limits.

    loan: what the node that reads is lent; queue_s: seconds of work that the reader has before it, 0 where its rate is
    not known; is_full: the answer has to wait for others to end.
    """

    reader: Node
    writer: Node
    num_late: int = 0
    crowding: float = 0.0
    wait_s: float = 0.0
    reads_s: float = 0.0
    begins_s: float = 0.0
    least_read_s: float = 0.0
    num_late_beside: int = 0
    loan: Loan | None = None
    queue_s: float = 0.0
    is_full: bool = False

    @property
    def is_timely(self) -> bool:
        """Whether all answers are expected to keep their limits beside it."""
        return not self.num_late and self.crowding <= 1


class Policy(Protocol):
    """Places requests."""

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: HandoverCosts, now: float
    ) -> Placed:
        """Raises RequestError when no pair of these nodes could serve the request."""
        ...


def within_pools(
    readers: Sequence[Node], writers: Sequence[Node], wanted: Wanted
) -> tuple[Sequence[Node], Sequence[Node]]:
    """Those between which the request can be handed over: that is from pool to pool, without annexes."""
    some_readers = [node for node in readers if len(wanted.prompt) <= node.pool_tokens]
    return some_readers, [node for node in writers if wanted.num_tokens <= node.pool_tokens]
