"""Tokens that tokenizer_config.json has beside those of tokenizer.json. As in transformers, texts are cut at them."""

from collections.abc import Collection, Iterator
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

LISTED: Final = "added_tokens_decoder"  # by their ids
MOST_DIGITS: Final = 9
OTHERS: Final = ("additional_special_tokens", "extra_special_tokens")


def add_tokens(tokenizer: Tokenizer, config: JsonFields, named: Collection[str]) -> None:
    """Adds those that the tokenizer lacks, or has in another way; `named` are the special ones with a role, such as
    pad_token. Raises ModelError where a new one would get another id than tokenizer_config.json says."""
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
    """A special token as the files write it: its text, or an object with its text as content."""
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
