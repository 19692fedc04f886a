"""What the grammar of an answer lets come, for a tokenizer of bytes (tests/tiny_models.py)."""

from serving_core.errors import RequestError
from tests.tiny_models import EOS


def tokens_in(mask):
    """The tokens that a mask allows."""
    return [8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def may_be(guide, text):
    """Whether this may be a whole answer."""
    try:
        mask = guide.allowed(list(text.encode()))
    except RequestError:
        return False
    return bool(mask[EOS // 8] >> EOS % 8 & 1)


def walk(guide, rng, *, closing, share, most_tokens):
    """The bytes of an answer that the grammar lets come, drawn at random; None for a longer one. Where one of the
    characters of `closing`, or the end, may come, one of these does, so often."""
    output = []
    while len(output) < most_tokens:
        tokens = tokens_in(guide.allowed(output))
        ends = [token for token in tokens if token == EOS or chr(token) in closing]
        token = rng.choice(ends if ends and rng.random() < share else tokens)
        if token == EOS:
            return bytes(output)
        output.append(token)
    return None
