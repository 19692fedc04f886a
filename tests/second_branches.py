"""What a second branch of draft tokens would bring: `python -m tests.second_branches MODEL` prints a table.

With a tree of draft tokens a step could compute, beside the continuation that lookup takes, that of another place,
which begins with another token. Answers of the model are replayed as if each step had up to NUM_DRAFT_TOKENS of each:
what a tree would give if it cost nothing but its rows. A branch computes the last token once more, in a block of its
own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

from decode_node.speculation import SHORTEST, Lookup, following
from engine.build import build_engine
from serving_core.settings import EngineSettings
from splitserve_bench.engine.speculation import CHAT, EDIT, SUMMARY, prompts_of
from tests.toy_scheduler import greedy, run_all

NUM_DRAFT_TOKENS: Final = 8
NUM_ANSWERS: Final = 16
NUM_TOKENS: Final = 120


class Step(NamedTuple):
    """What one step gave."""

    has_branch: bool
    num_chain: int  # draft tokens that came of the place that lookup takes
    num_tree: int  # that came of the better one


def two_places(lookup: Lookup, text: Sequence[int]) -> tuple[int, int | None]:
    """The place that lookup takes, and the one with the longest match among those that go on with another token."""
    best, _ = lookup.find(text)
    others = [each for each in lookup.places(text) if each[1] >= SHORTEST and text[each[0] + 1] != text[best + 1]]
    other, _ = max(others, key=lambda each: each[1], default=(None, 0))
    return best, other


def num_came(text: Sequence[int], place: int, rest: Sequence[int]) -> int:
    draft_tokens = following(text, place, min(NUM_DRAFT_TOKENS, len(rest)))
    return next((index for index, each in enumerate(draft_tokens) if each != rest[index]), len(draft_tokens))


def steps_of(prompt: list[int], answer: list[int], *, by_tree: bool) -> list[Step]:
    """Of one answer, whose first token is there."""
    lookup, known, steps = Lookup(), 1, []
    while known < len(answer):
        text, rest = [*prompt, *answer[:known]], answer[known:]
        lookup.index(text, len(text))
        best, other = two_places(lookup, text)
        chain = num_came(text, best, rest) if best >= 0 else 0
        tree = max(chain, num_came(text, other, rest)) if other is not None else chain
        steps.append(Step(other is not None, chain, tree))
        known += 1 + (tree if by_tree else chain)
    return steps


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
def main(model: Path) -> None:
    engine = build_engine(EngineSettings(model=str(model)))
    click.echo(
        f"{'text':<22}{'steps with a branch':>20}{'of them it came alone':>23}{'tokens a step':>15}{'with it':>9}"
    )
    for kind in (EDIT, SUMMARY, CHAT):
        prompts = prompts_of(kind, model, NUM_ANSWERS)
        runs = run_all(engine, prompts, greedy(NUM_TOKENS))
        answers = [[token.token_id for token in run] for run in runs]
        by_chain, by_tree = (
            [step for pair in zip(prompts, answers, strict=True) for step in steps_of(*pair, by_tree=by_tree)]
            for by_tree in (False, True)
        )
        num_tokens = sum(len(answer) - 1 for answer in answers)
        branches = [step for step in by_tree if step.has_branch]
        came = sum(step.num_tree > step.num_chain for step in branches) / max(1, len(branches))
        rates = [num_tokens / len(steps) for steps in (by_chain, by_tree)]
        click.echo(f"{kind:<22}{len(branches) / len(by_tree):>15.0%}{came:>15.0%}{rates[0]:>15.2f}{rates[1]:>9.2f}")


if __name__ == "__main__":
    main()
