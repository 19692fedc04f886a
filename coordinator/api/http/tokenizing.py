"""Parse the JSON of /tokenize and /detokenize. Performs no I/O."""

from dataclasses import dataclass
from typing import Final

from coordinator.api.http.conversations import parse_conversation
from coordinator.api.http.fields import Fields
from coordinator.api.http.known_fields import DETOKENIZE, TOKENIZE, settle
from coordinator.api.http.tools import parse_tools
from protos.inference_pb2 import ChatInput

_OF_CHATS: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """A call of /tokenize, for a conversation if `chat` is set, else for a prompt."""

    model: str
    chat: ChatInput | None
    prompt: str
    add_special_tokens: bool
    returns_texts: bool


def parse_tokenize(fields: Fields) -> Tokenizing:
    """Parse a call of /tokenize. Raises RequestError."""
    settle(fields, TOKENIZE)
    chat = _chat(fields) if "messages" in fields else None
    prompt = _prompt(fields) if chat is None else ""
    return Tokenizing(
        model=fields.text("model") or "",
        chat=chat,
        prompt=prompt,
        add_special_tokens=fields.boolean("add_special_tokens") is not False,
        returns_texts=fields.boolean("return_token_strs") or False,
    )


def parse_detokenize(fields: Fields, limit: int) -> tuple[str, list[int]]:
    """Parse a call of /detokenize. Returns the model's name and at most `limit` token ids. Raises RequestError."""
    settle(fields, DETOKENIZE)
    if "tokens" not in fields:
        raise fields.problem("tokens", "is missing")
    return fields.text("model") or "", fields.integers("tokens", limit)


def _chat(fields: Fields) -> ChatInput:
    if "prompt" in fields:
        raise fields.problem("prompt", "cannot be had beside messages: send one of them")
    if fields.boolean("add_special_tokens"):
        raise fields.problem("add_special_tokens", "(true) is not supported: the chat template writes them")
    return parse_conversation(fields, has_tools=bool(parse_tools(fields)))


def _prompt(fields: Fields) -> str:
    for name in _OF_CHATS:
        if fields.raw(name):
            raise fields.problem(name, "needs messages: a prompt has no chat template")
    prompt = fields.text("prompt")
    if prompt is None:
        raise fields.problem("prompt", "is missing: send it, or messages")
    return prompt
