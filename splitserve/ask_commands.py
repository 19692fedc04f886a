"""Commands that talk to a running server: generate, chat, status."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import click

from splitserve.answers import Chunk, Completion
from splitserve.client import Client
from splitserve.errors import ClientError
from splitserve.questions import Message, Prompt
from splitserve.sampling_options import sampling_options
from splitserve.terminal import report, status_view, stderr, stdout, timeline_view

STATUS_TIMEOUT_S = 10.0

Command = Callable[..., None]


def server_options(command: Command) -> Command:
    """--server and --api-key."""
    command = click.option(
        "--api-key", envvar="SPLITSERVE_API_KEY", show_envvar=True, help="Secret that the server asks for."
    )(command)
    return click.option(
        "--server", envvar="SPLITSERVE_SERVER", default="localhost:50051", show_default=True, help="HOST:PORT to ask."
    )(command)


@click.command()
@click.argument("text")
@server_options
@click.option(
    "--chat/--raw", "as_chat", default=None, help="With or without the chat template; default: if there is one."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each chunk; usage and timeline last.")
@click.option("--timeline", "with_timeline", is_flag=True, help="Show where the time went.")
@click.option("--cache-salt", default="", help="Share cached KV only with requests of the same salt.")
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=0, min_open=True), help="Seconds for the answer.")
@sampling_options
def generate(
    text: str,
    server: str,
    api_key: str | None,
    as_chat: bool | None,
    as_json: bool,
    with_timeline: bool,
    cache_salt: str,
    deadline_s: float | None,
    **sampling: Any,
) -> None:
    """Answer TEXT, streamed as it is written."""
    with Client(server, api_key=api_key) as client:
        if as_chat is None:
            as_chat = client.model_info().has_chat_template
        prompt: Prompt = [{"role": "user", "content": text}] if as_chat else text
        chunks = client.generate(prompt, cache_salt=cache_salt, deadline_s=deadline_s, **_given(sampling))
        completions = _print_json(chunks) if as_json else _print_text(chunks)
    if with_timeline and not as_json:
        for completion in completions:
            stderr.print(timeline_view(completion))


@click.command()
@server_options
@click.option("--system", help="What the model is told before the conversation.")
@sampling_options
def chat(server: str, api_key: str | None, system: str | None, **sampling: Any) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D leaves."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    with Client(server, api_key=api_key) as client:
        report(f"{client.model_info().served_model_name} at {server}. Ctrl-C stops an answer, Ctrl-D leaves.")
        for question in _questions():
            messages.append({"role": "user", "content": question})
            if answer := _print_turn(client.generate(messages, **_given(sampling))):
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


@click.command()
@server_options
def status(server: str, api_key: str | None) -> None:
    """Show the nodes of a cluster and their load."""
    with Client(server, api_key=api_key, timeout_s=STATUS_TIMEOUT_S) as client:
        stdout.print(status_view(client.model_info(), client.server_info(), client.loads()))


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


def _print_turn(chunks: Iterator[Chunk]) -> str:
    """Streams one answer of a conversation; what there is of it when it is stopped or fails."""
    answer: list[str] = []
    try:
        for chunk in chunks:
            click.echo(chunk.text, nl=False)
            answer.append(chunk.text)
        click.echo()
    except KeyboardInterrupt:
        report(" (stopped)")
    except ClientError as error:
        report(f"Error: {error}")
    return "".join(answer)


def _print_text(chunks: Iterable[Chunk]) -> list[Completion]:
    """One answer is streamed; several are shown one after the other when they are whole."""
    completions: list[Completion] = []
    later: dict[int, str] = {}
    for chunk in chunks:
        if chunk.index == 0:
            click.echo(chunk.text, nl=False)
        else:
            later[chunk.index] = later.get(chunk.index, "") + chunk.text
        if chunk.completion is not None:
            completions.append(chunk.completion)
    click.echo()
    for index in sorted(later):
        click.echo(f"--- answer {index + 1}\n{later[index]}")
    return completions


def _print_json(chunks: Iterable[Chunk]) -> list[Completion]:
    for chunk in chunks:
        click.echo(json.dumps(asdict(chunk)))
    return []


def _given(sampling: dict[str, Any]) -> dict[str, Any]:
    """What was given on the command line; click has () for a flag that may be repeated and was not given."""
    return {name: value for name, value in sampling.items() if value not in (None, ())}
