"""Read the tokenizer of a model folder, including the tokens that tokenizer_config.json adds. Torch-free."""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

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
    """Hold the contents of the files: the tokenizer, tokenizer_config.json, and the special tokens by role.

    A role is a name such as bos_token.
    """

    tokenizer: Tokenizer
    config: JsonFields
    special_tokens: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a model folder, with the tokens that tokenizer_config.json adds.

    Raises ModelError if a file is missing or broken, or adds a token that cannot be added.
    """
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
    """Return the id of the end-of-sequence token that the tokenizer's files name; None if they name none.

    Does not build the tokenizer, which takes a second for a large vocabulary. Raises ModelError if a file is broken.
    """
    config = _optional_json(folder / CONFIG_FILE)
    eos_token = _special_tokens(folder, config).get(EOS)
    if eos_token is None:
        return None
    try:
        return next((int(token_id) for text, token_id in _listed_tokens(folder, config) if text == eos_token), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # the files' contents are not validated before
        raise ModelError(f"the tokenizer's files in {folder} do not list tokens with their ids") from error


def _listed_tokens(folder: Path, config: JsonFields) -> Iterator[tuple[Any, Any]]:
    """Yield the tokens and their ids from the files that list them, the smallest file first."""
    for token_id, token in (config.raw(LISTED) or {}).items():
        yield token_text(token), token_id
    tokenizer = _optional_json(folder / TOKENIZER_FILE)
    for token in tokenizer.raw("added_tokens") or []:
        yield token["content"], token["id"]
    vocabulary = (tokenizer.raw("model") or {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # Unigram, with scores
        yield from ((piece, token_id) for token_id, (piece, _) in enumerate(vocabulary))


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return a digest, in hexadecimal, of the ids, texts and special flags of all tokens.

    Tokenizers with equal digests may still split texts differently.
    """
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


# Tokens that tokenizer_config.json adds to those of tokenizer.json. As in transformers, texts are split at them.

LISTED: Final = "added_tokens_decoder"  # by id
MOST_DIGITS: Final = 9
OTHERS: Final = ("additional_special_tokens", "extra_special_tokens")


def add_tokens(tokenizer: Tokenizer, config: JsonFields, named: Collection[str]) -> None:
    """Add, in place, the tokens of tokenizer_config.json that the tokenizer lacks or defines differently.

    `named` are the special tokens with a role, such as pad_token. Raises ModelError if a new token would get another id
    than tokenizer_config.json gives.
    """
    known = list(tokenizer.get_added_tokens_decoder().values())
    listed = {token_id: token for token_id, token in sorted(_listed(config).items()) if token not in known}
    stay_special = {*named, *(token.content for token in known if token.special)}
    for token in listed.values():
        token.special |= token.content in stay_special
    texts = {token.content for token in (*known, *listed.values())}
    special = [text for text in dict.fromkeys([*named, *_others(config)]) if text not in texts]
    new = {
        token_id: token.content for token_id, token in listed.items() if tokenizer.token_to_id(token.content) is None
    }
    try:
        tokenizer.add_tokens([*listed.values(), *(AddedToken(text, special=True) for text in special)])
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"tokens of tokenizer_config.json cannot be added: {str(error)[:200]}") from error
    for token_id, text in new.items():
        if (found := tokenizer.token_to_id(text)) != token_id:
            raise ModelError(
                f"tokenizer_config.json says that the token {text!r:.80} has id {token_id}, and behind those of "
                f"tokenizer.json, which lacks it, it has {found}"
            )


def token_text(token: Any) -> str | None:
    """Return the text of a special token as the files write it: a text, or an object with the text as `content`.

    None for any other value.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _listed(config: JsonFields) -> dict[int, AddedToken]:
    entries = config.nested(LISTED) or JsonFields({}, LISTED)
    return {_id(name, config): _token(entries.nested(name) or JsonFields({}, name)) for name in entries.names}


def _id(name: str, config: JsonFields) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) <= MOST_DIGITS):
        raise config.error(LISTED, "an object of tokens by their ids")
    return int(name)


def _token(fields: JsonFields) -> AddedToken:
    is_special = fields.boolean("special", False)
    normalized = fields.boolean("normalized", not is_special)
    flags = {name: fields.boolean(name, False) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(fields.text("content"), special=is_special, normalized=normalized, **flags)


def _others(config: JsonFields) -> Iterator[str]:
    for name in OTHERS:
        given = config.raw(name) or []
        if not isinstance(given, list | dict):
            raise config.error(name, "a list of tokens")
        for token in given.values() if isinstance(given, dict) else given:
            if (text := token_text(token)) is None:
                raise config.error(name, "a list of tokens")
            yield text
