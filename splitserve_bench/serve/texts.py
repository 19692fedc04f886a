"""Data sets of text, read as vLLM's `bench serve` reads them: ShareGPT's conversations, and prompts one a line.

ShareGPT's prompts are sent as they stand. The model's tokenizer tells here how long they are, with the special tokens
that it adds by itself, as the server's does there. Around those of a custom file goes the model's chat template, unless
told otherwise: the token ids are sent that a conversation of this one message has.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from coordinator.text.chat_template import USUAL
from coordinator.text.rendering import DEFAULT, Renderer
from coordinator.text.tokenizer import template_sources
from serving_core.tokenizer_files import TokenizerFiles, read_tokenizer_files
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.datasets import Shape
from splitserve_bench.serve.serve_options import CUSTOM, SHAREGPT
from splitserve_bench.serve.traces import json_rows, parsed, token_count

CUSTOM_OUTPUT_TOKENS: Final = 256
# Of ShareGPT's conversations those count whose prompt and reference answer have lengths in these bounds.
FEWEST_TOKENS: Final = 4
MOST_PROMPT_TOKENS: Final = 1024
MOST_TOKENS: Final = 2048  # of both together


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt and how long its answer is: as long as a reference answer where there is one."""

    prompt: str
    reference: str | None
    output_tokens: int


class Texts:
    """The prompts of one file."""

    def __init__(
        self,
        name: str,
        path: Path,
        tokenizer_folder: Path,
        output_tokens: int | None,
        *,
        skips_chat_template: bool = False,
    ) -> None:
        """Every answer has output_tokens where they are given, whatever the file says. A file that cannot be used is a
        BenchError naming place and value, as is a folder without the chat template; one without a tokenizer a
        ModelError."""
        self._path, self._is_pruned = path, name == SHAREGPT
        files = read_tokenizer_files(tokenizer_folder)
        self._tokenizer = files.tokenizer
        self._chat = _chat(files, tokenizer_folder) if name == CUSTOM and not skips_chat_template else None
        try:
            self._texts = list((_conversations if self._is_pruned else _lines)(path, output_tokens))
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{path} cannot be read: {error}") from error

    def shapes(self, num_requests: int, rng: Random) -> list[Shape]:
        """So many of them in an order that rng draws, none twice: fewer where there are no more."""
        shapes: list[Shape] = []
        for text in rng.sample(self._texts, len(self._texts)):
            if len(shapes) == num_requests:
                break
            shape = self._shape(text)
            if not self._is_pruned or _is_kept(shape, is_given=text.reference is None):
                shapes.append(shape)
        if not shapes:
            kept = f", prompts of {FEWEST_TOKENS} to {MOST_PROMPT_TOKENS} tokens and {MOST_TOKENS} with their answers"
            raise BenchError(f"{self._path} has no requests{kept if self._is_pruned else ''}")
        return shapes

    def _shape(self, text: _Text) -> Shape:
        if self._chat is not None:
            ids = self._tokenizer.encode(self._chat(text.prompt), add_special_tokens=False).ids  # it wrote them itself
            return Shape(tuple(ids), text.output_tokens)
        output_tokens = text.output_tokens if text.reference is None else len(self._encode(text.reference))
        return Shape(tuple(self._encode(text.prompt)), output_tokens, text.prompt)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def _chat(files: TokenizerFiles, folder: Path) -> Callable[[str], str]:
    """A conversation of one message as the model reads it."""
    source = template_sources(folder, files.config).get(DEFAULT)
    if source is None:
        raise BenchError(f"{folder} has no chat template: --skip-chat-template sends the prompts as they stand")
    renderer = Renderer(source, "", files.special_tokens, "")

    def rendered(prompt: str) -> str:
        asked = {"messages": [{"role": "user", "content": prompt}], **asdict(USUAL)}
        answer = json.loads(renderer.answer(asked))
        if "text" not in answer:
            raise BenchError(f"the chat template of {folder} does not take a prompt: {next(iter(answer.values()))}")
        return str(answer["text"])

    return rendered


def _is_kept(shape: Shape, *, is_given: bool) -> bool:
    """An answer whose length is given may be as short as it is wanted."""
    prompt_tokens, output_tokens = len(shape.prompt), shape.output_tokens
    is_long_enough = prompt_tokens >= FEWEST_TOKENS and (is_given or output_tokens >= FEWEST_TOKENS)
    return is_long_enough and prompt_tokens <= MOST_PROMPT_TOKENS and prompt_tokens + output_tokens <= MOST_TOKENS


def _conversations(path: Path, output_tokens: int | None) -> Iterator[_Text]:
    """The first turn of each that has two is its prompt, the second the reference answer."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise BenchError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
    except RecursionError as error:
        raise BenchError(f"{path} is nested too deeply") from error
    if not isinstance(entries, list):
        raise BenchError(f"{path} is no JSON list of conversations, as ShareGPT's is")
    for number, entry in enumerate(entries, start=1):
        where = f"{path}, entry {number}"
        turns = parsed(_turns, entry, "conversations", where)
        if len(turns) >= 2:
            prompt, answer = (parsed(_value, turn, "a turn's value", where) for turn in turns[:2])
            yield _Text(prompt, answer if output_tokens is None else None, output_tokens or 0)


def _lines(path: Path, output_tokens: int | None) -> Iterator[_Text]:
    with path.open(encoding="utf-8-sig") as file:
        for where, row in json_rows(file, path):
            prompt, own = parsed(_prompt, row.get("prompt"), "prompt", where), row.get("output_tokens")
            told = CUSTOM_OUTPUT_TOKENS if own is None else parsed(_positive, own, "output_tokens", where)
            yield _Text(prompt, None, output_tokens or told)


def _turns(entry: Any) -> list[Any]:
    turns = entry.get("conversations", []) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise TypeError
    return turns


def _value(turn: Any) -> str:
    return _text(turn.get("value") if isinstance(turn, dict) else None)


def _prompt(value: Any) -> str:
    if not (text := _text(value)):
        raise ValueError
    return text


def _text(value: Any) -> str:
    """Raises ValueError for half of a surrogate pair, which no server takes, too."""
    if not isinstance(value, str):
        raise TypeError
    value.encode()
    return value


def _positive(value: Any) -> int:
    if not (count := token_count(value)):
        raise ValueError
    return count
