"""Traces that look like a service's, and the command on them."""

import json
import random
from datetime import UTC, datetime, timedelta

from click.testing import CliRunner

from splitserve.cli import main
from splitserve_bench.plan.asked import AskedLoad

START = datetime(2024, 1, 1, tzinfo=UTC)


def write_trace(path, num, *, prompt_tokens, answer_tokens, seed=0):
    """Requests at random moments, one a second; half of the lengths are within a factor of two of these medians."""
    rng, at_s, lines = random.Random(seed), 0.0, ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(num):
        prompt, answer = (
            max(2, min(4 * median, round(median * rng.lognormvariate(0, 1))))
            for median in (prompt_tokens, answer_tokens)
        )
        lines.append(f"{(START + timedelta(seconds=at_s)).isoformat()},{prompt},{answer}")
        at_s += rng.expovariate(1.0)
    path.write_text("\n".join(lines) + "\n")
    return path


def load_of(trace, length_scale=1.0):
    return AskedLoad("azure", str(trace), length_scale, 1, 1, 0.0, 1.0, 0)


def dominance(*words):
    return CliRunner().invoke(main, ["bench", "dominance", *map(str, words)])


def figures_of(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])
