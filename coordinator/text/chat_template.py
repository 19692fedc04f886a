"""Render a model folder's chat template in a sandbox, as transformers' apply_chat_template does."""

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
MAX_NODES: Final = 10_000  # blocks, names and constants; the time to compile may grow with the square of their number

LOSSY: Final = (
    "the chat template (%s) writes the same prompt whatever a user says, neither as a text nor as a list of parts: "
    "answers to chats have nothing to do with what was asked; --chat-template FILE gives another one"
)

Messages = Sequence[Mapping[str, str | Sequence[str]]]
"""Messages with role and content, or with content_parts (a list of texts) instead of content.

extra_json is a JSON object with the other template fields of the message, or empty.
"""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Further inputs of a template. JSON is parsed by the rendering process; an empty string has no effect."""

    tools_json: str = ""  # a list in OpenAI's format
    template_kwargs_json: str = ""  # an object with template variables
    add_generation_prompt: bool = True  # the text ends where the assistant's output begins
    continue_final_message: bool = False  # the text ends with the content of the last message
    tool_form: str = ""  # key of rendering.FORMS for the format of calls, where the template itself shows no tools


USUAL: Final = RenderOptions()


class ChatTemplate:
    """Render messages to the text of a prompt, by a template in Jinja.

    `variables` are the special tokens by name, such as bos_token. `kwargs_json` has further variables, which requests
    may replace. Conversations with tools use `tool_source` if given. Raises ModelError when a source does not parse.
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
        """Start the rendering process in the background, so that the first conversation does not wait for its start."""
        self._program.begin()

    async def check(self) -> None:
        """Log an error that names each template whose text does not depend on the user's message. Raises nothing.

        Chat requests are still served, since a template may intend it.
        """
        try:
            lossy = (await self._program.ask({})).get("lossy")
        except RequestError as error:
            logger.warning("whether the chat template writes what users say is not known: %s", error)
            return
        if lossy:
            logger.error(LOSSY, lossy)

    async def render(self, messages: Messages, options: RenderOptions, asker: str = "") -> str:
        """Return the text of a conversation.

        Conversations of the same `asker`, the name of an API key, wait for each other. Raises RequestError: BAD_PARAM
        when the template refuses the messages or a field is invalid, ENGINE_ERROR, also logged, when the template
        fails.
        """
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
    """Raise ModelError for an invalid template, or a template too large to compile within the limits of a
    conversation."""
    if len(source) > MAX_CHARS:
        raise ModelError(f"the chat template has {len(source)} characters, the limit is {MAX_CHARS}")
    try:
        template = make_environment().parse(source)  # parsing only: compiling would evaluate constant expressions
        num_nodes = sum(1 for _ in template.find_all(jinja2.nodes.Node))
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is broken: {error.message}, in its line {error.lineno}") from error
    except (RecursionError, ValueError) as error:  # nesting too deep; numbers with too many digits
        raise ModelError(f"the chat template cannot be read: {str(error)[:100]}") from error
    if num_nodes > MAX_NODES:
        raise ModelError(f"the chat template has {num_nodes} blocks, names and constants, the limit is {MAX_NODES}")
