"""A model folder's chat template, rendered in a sandbox the way transformers' apply_chat_template does."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import jinja2

from coordinator.text.program import Program
from coordinator.text.rendering import MAX_BYTES, MAX_CPU_S, make_environment
from serving_core.errors import ModelError, RequestError
from serving_core.reasons import BAD_PARAM, ENGINE_ERROR

logger = logging.getLogger(__name__)

PROGRAM: Final = "coordinator.text.rendering"
MAX_CHARS: Final = 2**17  # of a template
MAX_NODES: Final = 10_000  # of its blocks, names and constants: what compiling takes may grow with their square

LOSSY: Final = (
    "the chat template (%s) writes the same prompt whatever a user says, neither as a text nor as a list of parts: "
    "answers to chats have nothing to do with what was asked; --chat-template FILE gives another one"
)

Messages = Sequence[Mapping[str, str | Sequence[str]]]
"""Each with role and content, or instead of content the texts of its parts, content_parts; and extra_json: what else
the template is to know of the message, a JSON object if not empty."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What else a template is given. The JSON is read where templates are rendered; empty, it asks for nothing."""

    tools_json: str = ""  # a list, as OpenAI's API has it
    template_kwargs_json: str = ""  # an object: variables
    add_generation_prompt: bool = True  # so that the text ends where the assistant's answer begins
    continue_final_message: bool = False  # so that it ends with the last message's content
    tool_form: str = ""  # how calls are written, of shown_tools.FORMS, where the template itself shows no tools


USUAL: Final = RenderOptions()


class ChatTemplate:
    """Messages to the text of a prompt.

    `variables` are the special tokens by name, such as bos_token; `kwargs_json` has more, which requests may replace.
    Conversations with tools take `tool_source` where there is one. Raises ModelError when a source does not parse.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], *, tool_source: str = "", kwargs_json: str = ""
    ) -> None:
        self.words = source + tool_source
        for each in (source, tool_source):
            _check(each)
        given = {
            "source": source,
            "tool_source": tool_source,
            "variables": dict(variables),
            "kwargs_json": kwargs_json,
        }
        self._program = Program(PROGRAM, given, MAX_CPU_S, MAX_BYTES)

    def begin(self) -> None:
        """Starts its program in the background, so that the first conversation need not wait for that."""
        self._program.begin()

    async def check(self) -> None:
        """Log an error that names each template which writes the same whatever a user says. Chats are served all the
        same: a template may mean it."""
        try:
            lossy = (await self._program.ask({})).get("lossy")
        except RequestError as error:
            logger.warning("whether the chat template writes what users say is not known: %s", error)
            return
        if lossy:
            logger.error(LOSSY, lossy)

    async def render(self, messages: Messages, options: RenderOptions, asker: str = "") -> str:
        """The text of a conversation of this asker. Raises RequestError when the template refuses what it is given, or
        fails, which is no fault of a client's."""
        answer = await self._program.ask({"messages": list(messages), **asdict(options)}, asker)
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            message = f"the chat template refuses the messages: {answer['refused']}"
            raise RequestError(BAD_PARAM, message, field="chat")
        if "problem" in answer:
            field = f"chat.{answer['field']}"
            raise RequestError(BAD_PARAM, f"{field} {answer['problem']}", field=field)
        failure = answer.get("failed") or f"it {answer['ended']}"
        logger.error("the chat template fails: %s", failure)
        raise RequestError(ENGINE_ERROR, f"the model's chat template fails: {failure}")


def _check(source: str) -> None:
    """Raise ModelError for what is no template, or a larger one than compiles in the time of a conversation."""
    if len(source) > MAX_CHARS:
        raise ModelError(f"the chat template has {len(source)} characters, the limit is {MAX_CHARS}")
    try:
        template = make_environment().parse(source)  # no more: compiling it would work out what is constant
        num_nodes = sum(1 for _ in template.find_all(jinja2.nodes.Node))
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is broken: {error.message}, in its line {error.lineno}") from error
    except (RecursionError, ValueError) as error:  # of what is nested too deeply; of numbers with too many digits
        raise ModelError(f"the chat template cannot be read: {str(error)[:100]}") from error
    if num_nodes > MAX_NODES:
        raise ModelError(f"the chat template has {num_nodes} blocks, names and constants, the limit is {MAX_NODES}")
