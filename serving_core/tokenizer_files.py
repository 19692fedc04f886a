"""The tokenizer of a model folder, for all who read it: with the tokens that tokenizer_config.json adds. Torch-free."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from serving_core.added_tokens import LISTED, add_tokens, token_text
from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields, read_json_object

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
EOS: Final = "eos_token"
SPECIAL_TOKEN_NAMES: Final = (
    "bos_token",
    EOS,
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What they hold: the tokenizer, tokenizer_config.json, and the special tokens by their roles, such as
    bos_token."""

    tokenizer: Tokenizer
    config: JsonFields
    special_tokens: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Raises ModelError when a file is missing or broken."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(f"there is no {path}; a tokenizer of another format is not supported")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path} is not a tokenizer: {str(error)[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _optional_json(folder / CONFIG_FILE)
    special_tokens = _special_tokens(folder, config)
    add_tokens(tokenizer, config, special_tokens.values())
    return TokenizerFiles(tokenizer, config, special_tokens)


def read_eos_token_id(folder: Path) -> int | None:
    """Return the id of the end-of-sequence token that the tokenizer's files name; None where they name none.

    The tokenizer is not made for that: it takes a second for a large vocabulary. Raises ModelError when a file is
    broken."""
    config = _optional_json(folder / CONFIG_FILE)
    eos_token = _special_tokens(folder, config).get(EOS)
    if eos_token is None:
        return None
    try:
        return next((int(token_id) for text, token_id in _listed_tokens(folder, config) if text == eos_token), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # what the files hold is not checked before
        raise ModelError(f"the tokenizer's files in {folder} do not list tokens with their ids") from error


def _listed_tokens(folder: Path, config: JsonFields) -> Iterator[tuple[Any, Any]]:
    """The tokens and their ids, in the files that list them, the smallest first."""
    for token_id, token in (config.raw(LISTED) or {}).items():
        yield token_text(token), token_id
    tokenizer = _optional_json(folder / TOKENIZER_FILE)
    for token in tokenizer.raw("added_tokens") or []:
        yield token["content"], token["id"]
    vocabulary = (tokenizer.raw("model") or {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # of Unigram, with scores
        yield from ((piece, token_id) for token_id, (piece, _) in enumerate(vocabulary))


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers whose tokens have the same ids and texts, and are special alike, however they cut a text."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = ", ".join(f"({token!r}, {ids[token]})" for token in sorted(ids, key=ids.__getitem__))
    special = sorted(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return hashlib.sha256(f"([{tokens}], {special})".encode()).hexdigest()


def _special_tokens(folder: Path, config: JsonFields) -> dict[str, str]:
    others = _optional_json(folder / "special_tokens_map.json")
    tokens = {name: token_text(config.raw(name)) or token_text(others.raw(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: token for name, token in tokens.items() if token is not None}


def _optional_json(path: Path) -> JsonFields:
    return read_json_object(path) if path.exists() else JsonFields({}, str(path))
