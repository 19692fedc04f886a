"""Rules that others place by, to be compared with. Pure.

    least-loaded   the fewest prompt tokens to compute; to write, the fewest answers
    lmetric        the least product of prompt tokens to compute, this prompt's among them, and answers
    arrow          the least of the other phase (tokens of answers for a reader, prompt tokens for a writer), then of
                   its own

lmetric is that of "LMetric" (arXiv 2603.15202), and arrow that of "Arrow" (arXiv 2505.11916), as far as they can be
told apart from the systems around them. A reader that writes too keeps the answer under least-loaded and lmetric, which
are rules for nodes that do both; arrow chooses the two apart.
"""

from collections.abc import Callable, Sequence
from typing import Final

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Node, candidates
from coordinator.control.placement.policy import Placed, Wanted, within_pools
from coordinator.control.transfer_costs import HandoverCosts
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER
from serving_core.shapes import DECODE, PREFILL

Score = Callable[[Node, Ledger, Prompt], tuple[float, ...]]
"""Less is better."""


class ByScore:
    """The best reader, and beside it the best writer."""

    def __init__(self, reading: Score, writing: Score, *, keeps: bool) -> None:
        """`keeps`: whether a reader that can write the answer does."""
        self._reading, self._writing, self._keeps = reading, writing, keeps

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: HandoverCosts, now: float
    ) -> Placed:
        """As Policy's."""
        writers = candidates(nodes, DECODE, wanted.num_tokens)

        def order(node: Node, score: Score) -> tuple[bool, tuple[float, ...], str]:
            return node in wanted.avoid, score(node, ledger, wanted.prompt), node.name

        readers = candidates(nodes, PREFILL, len(wanted.prompt))
        senders, takers = within_pools(readers, writers, wanted)
        for reader in sorted(readers, key=lambda node: order(node, self._reading)):
            others = takers if reader in senders else ()
            able = [node for node in writers if node is reader or (node in others and node.usable.takes_handovers)]
            if self._keeps and reader in able:
                return Placed(reader, reader)
            if able:
                return Placed(reader, min(able, key=lambda node: order(node, self._writing)))
        message = "no node that writes answers takes those of prompts that other nodes read"
        raise RequestError(NO_DECODE_WORKER, message)


def _tokens_to_compute(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    return (ledger.of(node).tokens_to_compute,)


def _answers(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    return (ledger.of(node).num_answers,)


def _product(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    account = ledger.of(node)
    return ((account.tokens_to_compute + prompt.tokens_to_compute(node)) * (account.num_answers + 1),)


def _answers_then_prompts(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    account = ledger.of(node)
    return account.tokens_held, account.tokens_to_compute


def _prompts_then_answers(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    account = ledger.of(node)
    return account.tokens_to_compute, account.tokens_held


LEAST_LOADED: Final = ByScore(_tokens_to_compute, _answers, keeps=True)
LMETRIC: Final = ByScore(_product, _product, keeps=True)
ARROW: Final = ByScore(_answers_then_prompts, _prompts_then_answers, keeps=False)
