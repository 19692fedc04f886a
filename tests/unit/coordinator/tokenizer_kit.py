"""What tests of tokenizers and chat templates begin with."""

import json

from coordinator.text.tokenizer import TokenLimit
from serving_core.errors import RequestError


def limit(most):
    return TokenLimit(most, lambda fewest: RequestError("PROMPT_TOO_LONG", f"{fewest} or more"))


ENOUGH = limit(10**9)


def edit_config(folder, **changes):
    """Change fields of tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
