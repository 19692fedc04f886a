"""Define the commands that generate text on a running server: generate and chat."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import click

from serving_core.units import KIB, MIB, size_of
from splitserve.client.answers import Chunk, Completion, ModelInfo
from splitserve.client.errors import ClientError, Refused
from splitserve.client.questions import TIMEOUT_S, Message, Sampling
from splitserve.commands.server_options import Server, server_options
from splitserve.commands.terminal import report, stderr, timeline_view

# ---- flags for the fields of `questions.Sampling` ----

Command = Callable[..., None]


def sampling_options(default_max_tokens: int) -> Callable[[Command], Command]:
    """Return a decorator that adds a flag for each field of Sampling to a command.

    Flags have no default of their own; the help of --max-tokens names `default_max_tokens` as the command's limit.
    """

    def add(command: Command) -> Command:
        for name, hint in reversed(get_type_hints(Sampling, include_extras=True).items()):
            kind, help = get_args(hint)
            if name == "max_tokens":
                help = f"Generate at most this many tokens; default: {default_max_tokens}, or the rest of the context."
            command = _sampling_option(name, kind, help)(command)
        return command

    return add


def _sampling_option(name: str, hint: Any, help: str) -> Callable[[Command], Command]:
    spelling = f"--{name.replace('_', '-')}"
    kinds = get_args(hint)
    if name == "logit_bias":
        return click.option(spelling, multiple=True, callback=_logit_bias, metavar="TOKEN_ID=BIAS", help=help)
    if name == "bad_tokens":
        help += " May be repeated."
        return click.option(spelling, multiple=True, callback=_token_runs, metavar="TOKEN_ID,...", help=help)
    if name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "choice"):
        kind = int if name.endswith("_ids") else str
        return click.option(spelling, multiple=True, type=kind, callback=_if_any, help=help + " May be repeated.")
    if bool in kinds:
        return click.option(f"{spelling}/--no-{spelling[2:]}", default=None, help=help)
    return click.option(spelling, type=kinds[0], help=help)


def _if_any(_: click.Context, __: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return values or None


def _token_runs(_: click.Context, __: click.Parameter, runs: tuple[str, ...]) -> list[list[int]] | None:
    try:
        return [[int(token_id) for token_id in run.split(",")] for run in runs] or None
    except ValueError as error:
        raise click.BadParameter("expected TOKEN_ID,..., such as 42,17") from error


def _logit_bias(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[int, float] | None:
    try:
        return {int(token_id): float(bias) for token_id, bias in (pair.split("=") for pair in pairs)} or None
    except ValueError as error:
        raise click.BadParameter("expected TOKEN_ID=BIAS, such as 42=-1.5") from error


GENERATE_TOKENS: Final = 256
CHAT_TOKENS: Final = 512
MAX_STDIN_BYTES: Final = 4 * MIB - 64 * KIB  # the server's limit of a message, less the other fields

Ask = Callable[..., Iterator[Chunk]]
"""Send a request with these fields of Sampling."""


resume_option: Final = click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Continue an output at its next token when the server restarts or the connection is lost.",
)


model_option: Final = click.option(
    "--model", "model_name", default="", help="Ask this model: the served one by its name, or one of its LoRA adapters."
)


deadline_option: Final = click.option(
    "--deadline",
    "deadline_s",
    default=TIMEOUT_S,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Give each request this many seconds; the server's --request-timeout-s applies too.",
)


@click.command()
@click.argument("text", metavar="TEXT|-", default="")
@server_options
@model_option
@click.option(
    "--chat/--raw",
    "as_chat",
    default=None,
    help="Put the prompt into the chat template, or send it as it stands; default: the template, if the model has one.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object a line for each chunk; usage and timeline come last."
)
@click.option("--timeline", "with_timeline", is_flag=True, help="Show where the time went.")
@click.option("--cache-salt", default="", help="Share cached prefixes only with requests of the same salt.")
@click.option("--ttft-ms", type=float, help="Set an SLO of this many milliseconds to the first token.")
@click.option("--tpot-ms", type=float, help="Set an SLO of this many milliseconds between tokens, in the mean.")
@click.option("--slo-class", default="", help="Name an SLO class of the server's configuration.")
@click.option(
    "--priority", type=int, help="Set a priority from -100 to 100, the lower the earlier; default: the class's, else 0."
)
@resume_option
@deadline_option
@sampling_options(GENERATE_TOKENS)
def generate(
    text: str,
    server: Server,
    model_name: str,
    as_chat: bool | None,
    as_json: bool,
    with_timeline: bool,
    cache_salt: str,
    ttft_ms: float | None,
    tpot_ms: float | None,
    slo_class: str,
    priority: int | None,
    resume: bool,
    deadline_s: float,
    **sampling: Any,
) -> None:
    """Generate text for the prompt TEXT, or for stdin with -, and stream it."""
    if not text:
        raise click.UsageError('there is no prompt: `splitserve generate "TEXT"`, or `splitserve generate -` for stdin')
    text = _stdin_text() if text == "-" else text
    with server.client() as client:
        model = client.model_info()
        if as_chat is None:
            as_chat = model.has_chat_template
        asking = Asking(model, _given(sampling), GENERATE_TOKENS)
        limits: dict[str, Any] = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "slo_class": slo_class, "priority": priority}
        given: dict[str, Any] = {"model": model_name, "cache_salt": cache_salt, "resume": resume, **limits}
        chunks = asking.answer(partial(client.generate, text, chat=as_chat, deadline_s=deadline_s, **given))
        if as_json:
            _print_json(chunks)
            return
        ends = _print_text(chunks)
    for index, (completion, request_id) in sorted(ends.items()):
        asking.report_end(completion, f"Answer {index + 1}: " if len(ends) > 1 else "")
        if with_timeline:
            stderr.print(timeline_view(completion, request_id))


@click.command()
@server_options
@model_option
@click.option("--system", help="Begin the conversation with this system message.")
@resume_option
@deadline_option
@sampling_options(CHAT_TOKENS)
def chat(server: Server, model_name: str, system: str | None, resume: bool, deadline_s: float, **sampling: Any) -> None:
    """Chat with the model.

    Ctrl-C stops an output, Ctrl-D exits. /reset starts a new conversation, /system TEXT sets the system message, /save
    FILE writes the conversation as JSON.
    """
    conversation = Conversation(system or "")
    with server.client() as client:
        model = client.model_info()
        asking = Asking(model, _given(sampling), CHAT_TOKENS)
        report(f"{model_name or model.served_model_name} at {server.target}. Ctrl-C stops an answer, Ctrl-D leaves.")
        for question in _questions():
            if (said := conversation.obey(question)) is not None:
                report(said)
                continue
            given: dict[str, Any] = {"model": model_name, "resume": resume, "deadline_s": deadline_s}
            messages = conversation.asking(question)
            if answer := _print_turn(asking, partial(client.generate, messages, **given)):
                conversation.add(question, answer)


class Asking:
    """Hold the sampling parameters of all requests of one command.

    Without --max-tokens, the limit is `default_max_tokens`, or the rest of the context if that is less.
    """

    def __init__(self, model: ModelInfo, sampling: dict[str, Any], default_max_tokens: int) -> None:
        self._model = model
        self._is_limit_named = "max_tokens" in sampling
        self._max_tokens = sampling.get("max_tokens", max(default_max_tokens, sampling.get("min_tokens", 0)))
        self._sampling = {**sampling, "max_tokens": self._max_tokens}

    def answer(self, ask: Ask) -> Iterator[Chunk]:
        """Call `ask` with the sampling parameters, and yield the chunks.

        If the context has no room for the command's own limit of tokens, calls it once more without this limit.
        """
        try:
            yield from ask(**self._sampling)
        except Refused as error:
            if self._is_limit_named or error.field != "max_tokens":
                raise
            yield from ask(**{**self._sampling, "max_tokens": None})

    def report_end(self, completion: Completion, beginning: str = "") -> None:
        """Print on stderr why the output stopped, after `beginning`, unless the model ended it."""
        if why := why_stopped(completion, self._model, self._max_tokens):
            report(beginning + why)


def _stdin_text() -> str:
    """Return the text on stdin without its last newline, as a shell would pass it.

    Raises UsageError when it is empty, too long or no UTF-8.
    """
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise click.UsageError(f"stdin has more than {size_of(MAX_STDIN_BYTES)}, the most that a prompt may have")
    try:
        text = data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is no UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text:
        raise click.UsageError("stdin is empty: there is nothing to answer")
    return text


def _questions() -> Iterator[str]:
    import readline  # noqa: F401  history and line editing for input()

    while True:
        try:
            question = input("> ").strip()
        except KeyboardInterrupt:
            click.echo()
            continue
        except EOFError:
            click.echo()
            return
        if question:
            yield question


def _print_turn(asking: Asking, ask: Ask) -> str:
    """Stream one output of a conversation. Returns its text, or the part that came before a stop or an error."""
    answer: list[str] = []
    completion = None
    try:
        for chunk in asking.answer(ask):
            click.echo(chunk.text, nl=False)
            answer.append(chunk.text)
            completion = chunk.completion
        click.echo()
        if completion is not None:
            asking.report_end(completion)
    except KeyboardInterrupt:
        report(" (stopped)")
    except ClientError as error:
        report(f"Error: {error}")
    return "".join(answer)


def _print_text(chunks: Iterable[Chunk]) -> dict[int, tuple[Completion, str]]:
    """Stream output 0, and print further outputs when they are complete.

    Returns the completion of each output and the id of its request, by index.
    """
    ends: dict[int, tuple[Completion, str]] = {}
    later: dict[int, str] = {}
    for chunk in chunks:
        if chunk.index == 0:
            click.echo(chunk.text, nl=False)
        else:
            later[chunk.index] = later.get(chunk.index, "") + chunk.text
        if chunk.completion is not None:
            ends[chunk.index] = (chunk.completion, chunk.request_id)
    click.echo()
    for index in sorted(later):
        click.echo(f"--- answer {index + 1}\n{later[index]}")
    return ends


def _print_json(chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        click.echo(json.dumps(asdict(chunk)))


def _given(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given; click passes () for an unset flag that may be repeated."""
    return {name: value for name, value in sampling.items() if value not in (None, ())}


# ---- conversation of `splitserve chat`, and its commands ----

COMMANDS: Final = "/reset, /system TEXT and /save FILE"
_COMMAND: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


class Conversation:
    """Hold the messages of a conversation, its system message included."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """Return all messages, in the form that the server takes, the system message first."""
        before: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*before, *self._turns]

    def asking(self, question: str) -> list[Message]:
        """Return the messages with a further question, which is not kept until `add`."""
        return [*self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Append a question and its answer to the conversation."""
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def obey(self, line: str) -> str | None:
        """Carry out a line that is a command (/NAME ...), and return the message to show; None for any other line.

        /reset and /system begin the conversation anew; /save writes a file.
        """
        if (command := _COMMAND.fullmatch(line)) is None:
            return None
        name, argument = command[1], (command[2] or "").strip()
        match name:
            case "reset":
                self._turns = []
                return "The conversation begins anew."
            case "system":
                self._system, self._turns = argument, []
                told = f"the model is told: {argument}" if argument else "the model is told nothing before"
                return f"The conversation begins anew; {told}"
            case "save":
                return self._save(argument)
        return f"There is no command /{name}; there are {COMMANDS}"

    def _save(self, file: str) -> str:
        """Write the messages to a new file, and return the message about it."""
        if not file:
            return "Nothing is saved: /save FILE names the file"
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        try:
            with Path(file).expanduser().open("x", encoding="utf-8", errors="replace") as opened:
                opened.write(text)
        except OSError as error:
            return f"Nothing is saved: {file}: {error.strerror}"
        except (RuntimeError, ValueError) as error:  # unknown home; a name with a null character
            return f"Nothing is saved: {file}: {error}"
        return f"Saved {len(self.messages)} messages to {file}"


# ---- why an output stopped, for a terminal ----


def why_stopped(completion: Completion, model: ModelInfo, max_tokens: int) -> str | None:
    """Return a sentence that says why an output stopped, or None if the model ended it.

    `max_tokens` is the limit that the request had, requested or the command's own.
    """
    match completion.finish_reason:
        case "stop":
            return _why_at_stop(completion.matched_stop, model)
        case "length":
            return f"The answer is cut off after {_tokens(completion.completion_tokens)}: " + _why_at_length(
                completion, model, max_tokens
            )
        case _:
            return f"The answer was ended after {_tokens(completion.completion_tokens)}: its request was aborted."


def _why_at_stop(matched: str | int | None, model: ModelInfo) -> str | None:
    if isinstance(matched, str):
        return f"Stopped at the stop string {matched!r} (--stop)."
    if matched is not None and matched not in model.eos_token_ids:
        return f"Stopped at token {matched} (--stop-token-ids)."
    return None


def _why_at_length(completion: Completion, model: ModelInfo, max_tokens: int) -> str:
    if completion.completion_tokens in (max_tokens, model.default_sampling_params.get("max_tokens")):
        return "--max-tokens raises this limit."
    num_tokens = completion.prompt_tokens + completion.completion_tokens
    if num_tokens >= model.max_model_len:
        return (
            f"with the prompt's {_tokens(completion.prompt_tokens)} it fills the context of {model.max_model_len} "
            "(--max-model-len of the server)."
        )
    return (
        f"with the prompt's {_tokens(completion.prompt_tokens)} it fills the KV cache of the server's nodes "
        "(their --kv-cache-memory-bytes)."
    )


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
