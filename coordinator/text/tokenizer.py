"""Tokenize text and chat messages with the files of a model folder."""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple

import tokenizers
from tokenizers.processors import TemplateProcessing

from coordinator.text.chat_template import USUAL, ChatTemplate, Messages, RenderOptions
from coordinator.text.detokenizer import Detokenizer, DetokenizerFactory
from coordinator.text.rendering import DEFAULT, TOOL_USE
from serving_core.errors import ModelError, RequestError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.model_files.tokenizer_files import TOKENIZER_FILE, read_tokenizer_files
from serving_core.reasons import BAD_PARAM

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

LONG_TEXT_CHARS: Final = 8192  # about a millisecond of work; longer texts are encoded off the event loop
PIECE_CHARS: Final = 2**16  # of a text that is probably too long, encoded before other texts get their turn
USUAL_TOKEN_CHARS: Final = 8  # upper bound of nearly all tokens of text
MIN_LONGEST_TOKEN_CHARS: Final = 128  # some tokenizers drop blanks, or make one token of unknown text
NUM_THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
END_TOKENS: Final = 16
TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDERS: Final = ("chat_templates", "additional_chat_templates")  # of named templates; the later one wins
PROCESSOR_FILE: Final = "chat_template.json"  # of multimodal models
PROBE: Final = "a"
PRIVATE: Final = ("auto_map", "name_or_path")  # keys of tokenizer_config.json that are not shown
USUAL_CLASS: Final = "PreTrainedTokenizerFast"


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """The largest number of tokens of a text, and the error for a text with at least the given number."""

    most: int
    refusal: Callable[[int], RequestError]


class Tokenizer:
    """Tokenize with one model folder's tokenizer, and its chat template if it has one.

    Long texts are encoded by a few threads, first come, first served; a canceled caller leaves the queue.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate | None, info_json: str = "{}"
    ) -> None:
        """Create the tokenizer. Without `chat_template`, chats are refused.

        `info_json` is the response of /tokenizer_info.
        """
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.info_json = info_json
        self._detokenizers = DetokenizerFactory(tokenizer)
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
        self._longest_token_chars = max(longest, MIN_LONGEST_TOKEN_CHARS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")
        self._tool_form = ""

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def template_words(self) -> str:
        """Return the source of the chat template; empty without one."""
        return self._chat_template.words if self._chat_template is not None else ""

    def begin(self) -> None:
        """Start the process that renders conversations in the background, if there is a chat template."""
        if self._chat_template is not None:
            self._chat_template.begin()

    async def check(self) -> None:
        """Log an error if the chat template loses the user's text. Does nothing without a chat template."""
        if self._chat_template is not None:
            await self._chat_template.check()

    @cached_property
    def num_end_tokens(self) -> int:
        """Return the number of special tokens that the tokenizer appends to a text."""
        return len(_added_tokens(self._tokenizer)[1])

    async def encode(self, text: str, limit: TokenLimit, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer usually adds.

        Raises the limit's error as soon as the text certainly exceeds it. The result may exceed the limit nevertheless:
        the caller must check its length.
        """
        if (fewest := len(text) // self._longest_token_chars) > limit.most:
            raise limit.refusal(fewest)
        if len(text) > max(PIECE_CHARS, USUAL_TOKEN_CHARS * limit.most):
            await self._check_pieces(text, limit)
        return await self._in_turn_if_long(len(text), self._encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: Messages, limit: TokenLimit, options: RenderOptions = USUAL, asker: str = ""
    ) -> list[int]:
        """Return the token ids of a conversation.

        Conversations of the same `asker`, the name of an API key, wait for each other. Raises RequestError when the
        model has no chat template or the template refuses the input, and as `encode` does.
        """
        text = await self._render(messages, options, asker)
        return await self.encode(text, limit, add_special_tokens=False)  # the template wrote the special tokens already

    async def encode_around(
        self, messages: Messages, limit: TokenLimit, options: RenderOptions = USUAL, asker: str = ""
    ) -> tuple[list[int], str]:
        """Return the token ids of a conversation up to the end of its last message's content, and the text behind it.

        Raises RequestError as `encode_chat` does, and when the template does not write that content exactly once.
        """
        mark = secrets.token_hex(16)
        text = await self._render([*messages[:-1], _with_end(messages[-1], mark)], options, asker)
        head, *tails = text.split(mark)
        if len(tails) != 1:
            problem = f"the chat template writes the last message {len(tails)} times, and nothing can follow it"
            raise RequestError(BAD_PARAM, problem, field="chat")
        return await self.encode(head, limit, add_special_tokens=False), tails[0]

    async def _render(self, messages: Messages, options: RenderOptions, asker: str) -> str:
        if self._chat_template is None:
            raise RequestError(BAD_PARAM, "the model has no chat template: send text or token ids", field="chat")
        return await self._chat_template.render(messages, replace(options, tool_form=self._tool_form), asker)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; unknown ids have no text."""
        return await self._in_turn_if_long(len(token_ids), self._decode, token_ids)

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them; an empty string for an unknown id."""
        return await self._in_turn_if_long(len(token_ids), self._tokens, token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token contributes within a text; empty for an unknown id."""
        return self._detokenizers.token_bytes(token_id)

    def end_of(self, prompt: Sequence[int]) -> str:
        """Return the text of the prompt's last END_TOKENS tokens, in which tags of thoughts are looked for."""
        return b"".join(map(self.token_bytes, prompt[-END_TOKENS:])).decode(errors="replace")

    def keep(self, texts: Collection[str]) -> None:
        """Leave special tokens with these texts in the text of later outputs, even when special tokens are skipped."""
        self._detokenizers.keep(texts)

    def show_tools(self, form: str) -> None:
        """List tools in a message of all later conversations, for a chat template that does not show them itself.

        `form`, a key of rendering.FORMS, is the format of calls that the message states.
        """
        self._tool_form = form

    def detokenizer(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer for one output, whose text follows that of the tokens `after`."""
        return self._detokenizers(skip_special_tokens=skip_special_tokens, after=after)

    async def _check_pieces(self, text: str, limit: TokenLimit) -> None:
        """Raise the limit's error when the pieces of a text show that it has too many tokens."""
        fewest = 0
        for start in range(0, len(text), PIECE_CHARS):
            token_ids = await self._in_turn(self._encode, text[start : start + PIECE_CHARS], False)
            fewest += len(token_ids) - self._longest_token_chars  # a cut may make one token several
            if fewest > limit.most:
                raise limit.refusal(fewest)

    async def _in_turn_if_long(self, length: int, function: Callable[[*Ts], R], *args: *Ts) -> R:
        return function(*args) if length <= LONG_TEXT_CHARS else await self._in_turn(function, *args)

    async def _in_turn(self, function: Callable[[*Ts], R], *args: *Ts) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike the single call, the batch call lets other threads run.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        [text] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return str(text)

    def _tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


def _with_end(message: Mapping[str, str | Sequence[str]], end: str) -> dict[str, str | Sequence[str]]:
    """Return the message with this text at the end of its content."""
    if parts := message.get("content_parts"):
        return {**message, "content_parts": [*parts[:-1], f"{parts[-1]}{end}"]}
    return {**message, "content": f"{message['content']}{end}"}


def _added_tokens(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a text."""
    plain = tokenizer.encode(PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(PROBE).ids
    starts = range(len(whole) - len(plain) + 1)
    start = next((at for at in starts if whole[at : at + len(plain)] == plain), len(whole))
    return whole[:start], whole[start + len(plain) :]


def read_tokenizer(
    folder: Path, *, chat_template: str = "", template_kwargs_json: str = "", embeds: bool = False
) -> Tokenizer:
    """Read tokenizer.json and the chat template of a folder, and return the tokenizer.

    `chat_template` is the path of a template to use instead, and `template_kwargs_json` a JSON object of template
    variables. With `embeds`, texts end as the model's embeddings require (add_eos_token). Raises ModelError when a file
    is missing or invalid.
    """
    files = read_tokenizer_files(folder)
    tokenizer, config, special_tokens = files.tokenizer, files.config, files.special_tokens
    sources = {DEFAULT: _text_of(Path(chat_template))} if chat_template else template_sources(folder, config)
    if embeds and config.raw("add_eos_token") is True:
        _add_at_end(tokenizer, special_tokens.get("eos_token", ""), folder / TOKENIZER_FILE)
    info_json = _info_json(config, {**special_tokens, "chat_template": sources.get(DEFAULT)})
    if DEFAULT not in sources:
        return Tokenizer(tokenizer, None, info_json)
    template = ChatTemplate(
        sources[DEFAULT],
        special_tokens,
        tool_source=sources.get(TOOL_USE, ""),
        kwargs_json=template_kwargs_json,
    )
    return Tokenizer(tokenizer, template, info_json)


def _add_at_end(tokenizer: tokenizers.Tokenizer, eos_token: str, path: Path) -> None:
    """Append this token to all texts, as transformers does when tokenizer_config.json says so."""
    try:
        first, last = _added_tokens(tokenizer)
        eos = tokenizer.token_to_id(eos_token)
        if last or eos is None:
            return
        named = [(tokenizer.id_to_token(token_id), token_id) for token_id in [*first, eos]]
        pieces = [name for name, _ in named]
        tokenizer.post_processor = TemplateProcessing(
            single=[*pieces[:-1], "$A", pieces[-1]], special_tokens=list(dict(named).items())
        )
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path} takes no end token: {str(error)[:200]}") from error


def _info_json(config: JsonFields, others: dict[str, Any]) -> str:
    """Return tokenizer_config.json without paths and code references, with these values replaced."""
    names = [name for name in config.names if name not in PRIVATE and not name.endswith("_file")]
    info = {"tokenizer_class": USUAL_CLASS, **{name: config.raw(name) for name in names}, **others}
    try:
        return json.dumps(info)
    except RecursionError as error:
        raise ModelError("tokenizer_config.json is nested too deeply") from error


def template_sources(folder: Path, config: JsonFields) -> dict[str, str]:
    """Return the source of each chat template of a model folder, by name.

    DEFAULT is for all conversations, TOOL_USE for those with tools. `config` is tokenizer_config.json. As in
    transformers, separate files take precedence over it; chat_template.json is used when there is neither. Raises
    ModelError for a file that cannot be read.
    """
    files = [(name, folder / sub / f"{name}.jinja") for sub in TEMPLATE_FOLDERS for name in (DEFAULT, TOOL_USE)]
    files.append((DEFAULT, folder / TEMPLATE_FILE))
    found = {name: _text_of(path) for name, path in files if path.is_file()}
    if DEFAULT in found:
        return found
    of_config = _templates_in(config)
    if not of_config and (folder / PROCESSOR_FILE).is_file():
        of_config = _templates_in(read_json_object(folder / PROCESSOR_FILE))
    return of_config | found


def _templates_in(fields: JsonFields) -> dict[str, str]:
    """Return the templates of a JSON file, which has one or a list of named ones."""
    source = fields.raw("chat_template")
    if isinstance(source, list):
        parts = [part for part in source if isinstance(part, dict)]
        named = {str(part.get("name")): part.get("template") for part in parts}
    else:
        named = {DEFAULT: source}
    found: dict[str, str] = {}
    for name in (DEFAULT, TOOL_USE):
        if (text := named.get(name)) is not None:
            if not isinstance(text, str):
                raise fields.error("chat_template", "a string")
            found[name] = text
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
