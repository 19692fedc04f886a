"""Place requests by published rules, as baselines to compare with. Pure.

    least-loaded   prefill: the fewest prompt tokens to compute; decode: the fewest sequences
    lmetric        the least product of the prompt tokens to compute, this prompt's included, and the sequences
    arrow          the least load of the other phase (tokens of sequences for prefill, prompt tokens for decode), then
                   of the own phase

lmetric follows "LMetric" (arXiv 2603.15202) and arrow follows "Arrow" (arXiv 2505.11916), as far as the rules can be
separated from the systems around them. Under least-loaded and lmetric, which are rules for mixed nodes, a prefill node
that can also decode keeps the sequence; arrow chooses the two nodes independently.
"""

from collections.abc import Callable, Sequence
from typing import Final

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Node, candidates
from coordinator.control.placement.costs import TransferEstimates
from coordinator.control.placement.policy import Placed, Wanted, within_pools
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER
from serving_core.shapes import DECODE, PREFILL

Score = Callable[[Node, Ledger, Prompt], tuple[float, ...]]
"""Return the score of a node: less is better."""


class ByScore:
    """Choose the prefill node with the least score, and beside it the decode node with the least score."""

    def __init__(self, reading: Score, writing: Score, *, keeps: bool) -> None:
        """Create a policy from two scores. `keeps`: a prefill node that can decode the sequence keeps it."""
        self._reading, self._writing, self._keeps = reading, writing, keeps

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, handover: TransferEstimates, now: float
    ) -> Placed:
        """Return the placement, as Policy.place does."""
        decode_nodes = candidates(nodes, DECODE, wanted.num_tokens)

        def order(node: Node, score: Score) -> tuple[bool, tuple[float, ...], str]:
            return node in wanted.avoid, score(node, ledger, wanted.prompt), node.name

        prefill_nodes = candidates(nodes, PREFILL, len(wanted.prompt))
        senders, takers = within_pools(prefill_nodes, decode_nodes, wanted)
        for prefill_node in sorted(prefill_nodes, key=lambda node: order(node, self._reading)):
            others = takers if prefill_node in senders else ()
            able = [
                node
                for node in decode_nodes
                if node is prefill_node or (node in others and node.usable.takes_handovers)
            ]
            if self._keeps and prefill_node in able:
                return Placed(prefill_node, prefill_node)
            if able:
                return Placed(prefill_node, min(able, key=lambda node: order(node, self._writing)))
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
