"""What decides on which nodes a request is served. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from coordinator.control.attempts import Loan
from coordinator.control.handover import HandoverCosts
from coordinator.control.ledger import Ledger
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Node
from serving_core.due import Due

# Of the tightest limit, a step of all answers on the node that writes; found in simulation.
CROWDED: Final = 1.03
EASY: Final = 0.96  # on a node that only writes, where every step is one of answers, and its seconds are guessed


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt asks for: the prompt that it begins with, and room for num_tokens, those of prompt and answer
    together. Nodes of `avoid` come last. num_output tokens of the answer are there already, and num_left are expected
    at most; None: all that there is room for. So many requests that make nobody late come a second, lately."""

    prompt: Prompt
    num_tokens: int
    avoid: Collection[Node] = ()
    due: Due | None = None
    num_output: int = 0
    num_left: int | None = None
    requests_per_s: float = 0.0


class Placed(NamedTuple):
    """The node that reads the prompt and the node that writes the answer: the same one, or two with a hand-over.

    num_late: how many of all answers with limits are expected to miss one because of it, itself among them; crowding:
    a step of the answers on the node that writes, this one's too, by the tightest of their limits on TPOT; wait_s:
    seconds after which its first token would be in time, and there is room or half of the answers there have ended, as
    far as that is known; reads_s: seconds that its prompt takes by itself; begins_s: seconds after which it is read,
    inf where no time is better for it; loan: what the node that reads is lent. The four that follow num_late are worked
    out where somebody has limits.
    """

    reader: Node
    writer: Node
    num_late: int = 0
    crowding: float = 0.0
    wait_s: float = 0.0
    reads_s: float = 0.0
    begins_s: float = 0.0
    loan: Loan | None = None

    @property
    def is_timely(self) -> bool:
        """Whether all answers are expected to keep their limits beside it."""
        return not self.num_late and self.crowding <= CROWDED

    @property
    def is_easy(self) -> bool:
        """Whether they are without risk, so that there is no reason to wait."""
        return not self.num_late and self.crowding <= (CROWDED if self.writer.usable.reads else EASY)


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
