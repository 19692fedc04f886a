"""Traces that look like a service's."""

import random
from datetime import UTC, datetime, timedelta

START = datetime(2024, 1, 1, tzinfo=UTC)


def write_trace(path, num, *, prompt_tokens, answer_tokens, seed=0):
    """Write requests at random moments, one a second; half of the lengths are within a factor of two of these
    medians."""
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
