"""Build tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

A file names the kind of its tokenizer and, for byte-level ones, how text is split before merging. The names' meaning is
not in the file: an unknown name is refused, since tokens would be wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

MOST_TOKENS: Final = 2**20
MOST_TOKEN_CHARS: Final = 1024
MOST_VOCABULARY_CHARS: Final = 2**24
CONTROL, USER_DEFINED = 3, 4  # token types; other types need no handling
SPACE: Final = "\u2581"  # SentencePiece's space
ROLES: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3: Final = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_QWEN_2: Final = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_QWEN_3_5: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """Text splitting of a byte-level tokenizer: by a pattern, or as GPT-2 does."""

    pattern: str = ""
    digits_alone: bool = False
    composes: bool = False  # NFC normalization
    takes_whole_words: bool = False  # a word that is a token is not built by merges
    adds_bos: bool = False  # where the file does not say


SPLITTINGS: Final = {
    "gpt-2": Splitting(),
    "olmo": Splitting(composes=True),
    "command-r": Splitting(digits_alone=True, composes=True),
    "dbrx": Splitting(_LLAMA_3),
    "gpt-4o": Splitting(_O200K),
    **dict.fromkeys(("refact", "smollm", "starcoder"), Splitting(digits_alone=True)),
    "qwen2": Splitting(_QWEN_2, composes=True),
    "qwen35": Splitting(_QWEN_3_5, composes=True),
    "deepseek-r1-qwen": Splitting(_QWEN_2),
    "tekken": Splitting(_TEKKEN, takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(
        ("lfm2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe"),
        Splitting(_LLAMA_3, takes_whole_words=True, adds_bos=True),
    ),
}


def tokenizer_of(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describe; `where` names the file in errors.

    Raises ModelError for an unknown kind or invalid metadata.
    """
    fields = JsonFields({key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}, where)
    tokens, kind = _tokens(fields), fields.text("model")
    try:
        if kind == "gpt2":
            splitting = _splitting(fields)
            tokenizer, adds_bos = _byte_level(tokens, _merges(fields), splitting), splitting.adds_bos
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece(tokens, fields), True
        else:
            raise ModelError(f"{where} has a tokenizer of kind {kind!r:.40}; supported are gpt2 and llama")
        _add_whole_tokens(tokenizer, tokens, fields)
        _add_ends(tokenizer, tokens, fields, adds_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"the tokenizer in {where} is broken: {str(error)[:200]}") from error
    return tokenizer


def tokenizer_config_of(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json: the chat template and the tokens that it may use.

    `where` names the file in errors. Raises ModelError for invalid metadata.
    """
    fields = JsonFields({key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}, where)
    tokens = _tokens(fields)
    named = {name: _token_id(fields, role, tokens) for role, name in ROLES.items()}
    template = fields.text("tokenizer.chat_template", "")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        **({"chat_template": template} if template else {}),
    }


def _tokens(fields: JsonFields) -> list[str]:
    tokens: list[str] = _texts(fields, "tokens")
    if not 0 < len(tokens) <= MOST_TOKENS or sum(map(len, tokens)) > MOST_VOCABULARY_CHARS:
        raise ModelError(f"a vocabulary of {len(tokens)} tokens is not one of 1 to {MOST_TOKENS} of usual lengths")
    if (longest := max(map(len, tokens))) > MOST_TOKEN_CHARS:
        raise ModelError(f"a token of {longest} characters is longer than {MOST_TOKEN_CHARS}")
    if len(set(tokens)) < len(tokens):
        raise ModelError(f"{len(tokens) - len(set(tokens))} tokens of the vocabulary are there twice")
    return tokens


def _texts(fields: JsonFields, name: str) -> list[str]:
    values = fields.raw(name)
    if not isinstance(values, list):  # text arrays are the only lists in a header
        raise fields.error(name, "a list of texts")
    return values


def _numbers(fields: JsonFields, name: str, length: int) -> Sequence[float]:
    values = fields.raw(name)
    if isinstance(values, str | list) or not isinstance(values, Sequence) or len(values) != length:
        raise ModelError(f"the tokenizer has no {name} for each of its {length} tokens")
    return values


def _token_id(fields: JsonFields, role: str, tokens: Sequence[str]) -> int | None:
    name = f"{role}_token_id"
    if fields.raw(name) is None:
        return None
    token_id = fields.integer(name, minimum=0)
    if token_id >= len(tokens):
        raise fields.error(name, f"below the number of tokens ({len(tokens)})")
    return token_id


def _splitting(fields: JsonFields) -> Splitting:
    name = fields.text("pre", "default")
    if name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise ModelError(f"a tokenizer that splits text as {name!r:.40} is not supported; supported are {known}")
    return SPLITTINGS[name]


def _merges(fields: JsonFields) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in _texts(fields, "merges")]
    if any(len(pair) != 2 for pair in pairs):
        raise fields.error("merges", "a list of pairs with a space between")
    return pairs  # type: ignore[return-value]


def _byte_level(tokens: Sequence[str], merges: list[tuple[str, str]], splitting: Splitting) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.takes_whole_words))
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits_alone else []
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], fields: JsonFields) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if "merges" in fields:
        merges = _merges(fields)
    else:
        merges = _merges_by_score(vocabulary, _numbers(fields, "scores", len(tokens)))
    unknown = _token_id(fields, "unknown", tokens)
    unk_token = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    begins_with_space = fields.boolean("add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges, ordered by score, highest first, as SentencePiece merges."""
    pairs = [
        (-scores[token_id], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, token_id in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], fields: JsonFields) -> None:
    """Add the tokens within which text is never split."""
    types = _numbers(fields, "token_type", len(tokens))
    of_type = {
        wanted: [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
        for wanted in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in of_type[CONTROL]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in of_type[USER_DEFINED]])


def _add_ends(tokenizer: Tokenizer, tokens: Sequence[str], fields: JsonFields, adds_bos: bool) -> None:
    """Add the tokens before and after every text."""
    adds = {"bos": fields.boolean("add_bos_token", adds_bos), "eos": fields.boolean("add_eos_token", False)}
    ids = {role: _token_id(fields, role, tokens) for role in adds if adds[role]}
    special = [
        {"id": role, "ids": [token_id], "tokens": [tokens[token_id]]}
        for role, token_id in ids.items()
        if token_id is not None
    ]
    if special:
        names = {each["id"] for each in special}
        pieces = [piece for piece in ("bos", "$A", "eos") if piece == "$A" or piece in names]
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)
