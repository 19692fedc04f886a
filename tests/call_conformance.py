"""The suite canitoolcall against the readers of calls and thoughts: `python -m tests.call_conformance` writes the table
of docs/guides/tool-calls.md."""

import random
from collections import Counter
from functools import cache

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import CheckResult, Observation, ParsedToolCall, ParseResult, Status

from coordinator.text.answer_format import AnswerFormat, answer_format
from coordinator.text.calls.reader import Kind
from tests.doc_table import DOCS, page_with

PARSERS = {  # --tool-call-parser and --reasoning-parser by variant of a model
    "deepseek-v3": ("deepseek_v3", "none"),
    "deepseek-v31": ("deepseek_v31", "deepseek_v3"),
    "deepseek-v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek-v4": ("deepseek_v4", "deepseek_v4"),
    "deepseek-v41": ("deepseek_v41", "deepseek_v41"),
    "qwen3-hybrid": ("hermes", "qwen3"),
    "qwen3-thinking-2507": ("hermes", "deepseek_r1"),
    "qwen3-instruct-2507": ("hermes", "none"),
    "qwen3.8": ("qwen3_coder", "qwen3"),
    "qwen3.6": ("qwen3_coder", "qwen3"),
    "qwen3.5": ("qwen3_coder", "qwen3"),
    "qwen3-coder": ("qwen3_coder", "none"),
    "qwen3-coder-next": ("qwen3_coder", "none"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "kimi-k2-thinking": ("kimi_k2", "kimi_k2"),
    "kimi-k2-instruct": ("kimi_k2", "none"),
    "kimi-k3-xtml": ("kimi_k3", "kimi_k3"),
    "glm45-newline": ("glm45", "glm45"),
    "glm47-compact": ("glm47", "glm47"),
    "glm53-compact": ("glm47", "glm47"),
    "llama3-json": ("llama3_json", "none"),
    "llama4-pythonic": ("llama4_pythonic", "none"),
    "gemma4": ("gemma4", "gemma4"),
    "v13-think": ("mistral", "mistral"),
    "v13plus-think": ("mistral", "mistral"),
    "v11-think-text": ("mistral", "think"),
}
OTHERS = {"mistral": ("mistral", "none")}  # by family
CUTS = 5
PAGE = DOCS / "guides" / "tool-calls.md"


def parse(fixture: Fixture, pieces: list[str], form: AnswerFormat, prompt_end: str) -> ParseResult:
    """What the readers tell of an output that comes in these pieces."""
    functions = [tool.get("function", tool) for tool in fixture.tools]
    reader = form.reader(prompt_end, {each["name"]: each.get("parameters") or {} for each in functions})
    told, calls = {Kind.TEXT: "", Kind.REASONING: ""}, []
    for piece in [each for text in pieces for each in reader.feed(text)] + reader.finish():
        match piece.kind:
            case Kind.CALL:
                calls.append([piece.text, ""])
            case Kind.ARGUMENTS:
                calls[-1][1] += piece.text
            case kind:
                told[kind] += piece.text
    return ParseResult(told[Kind.TEXT], told[Kind.REASONING], tuple(ParsedToolCall(*call) for call in calls))


def cuts(text: str, seed: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.randint(1, 24)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@cache
def checked() -> dict[str, tuple[Status, list[CheckResult]]]:
    """The status and the checks of each fixture: the whole text at once, single characters, and random cuts."""
    families, found = load_families(), {}
    for fixture in load_fixtures():
        family = families[fixture.family]
        model = next(each for each in family.reference_models if each.repo == fixture.models[0])
        form = answer_format(*PARSERS.get(model.variant, OTHERS.get(fixture.family)), "")
        prompt_end = model.default_generation_prompt if fixture.generation_prompt is None else fixture.generation_prompt
        text = fixture.raw_output
        splits = {"whole": [text], "each": [*text], **{f"cut-{seed}": cuts(text, seed) for seed in range(CUTS)}}
        results = {name: parse(fixture, pieces, form, prompt_end) for name, pieces in splits.items()}
        rows = run_checks(fixture, family, Observation(results["whole"], results))
        found[fixture.id] = case_status(rows), rows
    return found


def counts() -> dict[str, Counter]:
    """How many fixtures of each family have each status."""
    told = {}
    for name, (status, _) in checked().items():
        told.setdefault(name.partition("/")[0], Counter())[status] += 1
    return told


def table() -> str:
    """The counts by family as a table."""
    lines = ["| family | outputs | pass | soft pass | fail |", "|---|---|---|---|---|"]
    total = sum(counts().values(), Counter())
    for family, told in (*counts().items(), ("all", total)):
        numbers = (told.total(), *(told[status] for status in (Status.PASS, Status.SOFT_PASS, Status.FAIL)))
        lines.append(f"| {family} | {' | '.join(map(str, numbers))} |")
    return "\n" + "\n".join(lines) + "\n\n"


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(), PAGE, "tests.call_conformance")


if __name__ == "__main__":
    PAGE.write_text(page())
