"""Compile structured-output constraints to grammars for the nodes, and refuse what cannot be enforced."""

import asyncio
import logging
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from coordinator.text import constraints
from coordinator.text.answering import KILLED
from coordinator.text.constraints import MAX_BYTES, MAX_CPU_S, NO_LEEWAY, Asked, Leeway
from coordinator.text.program import Program
from coordinator.text.reasoning import Thoughts, thoughts_behind
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

logger = logging.getLogger(__name__)

PROGRAM: Final = "coordinator.text.compiling"
MAX_REASON_CHARS: Final = 300
MAX_KNOWN: Final = 32
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"  # bounded: some models write blanks without end


@dataclass(slots=True)
class _Compilation:
    """A compilation that is running or waits for its turn."""

    task: asyncio.Task[dict[str, str]]
    num_waiting: int = 0


class Structures:
    """Compile grammars for outputs of one model, one at a time, in a process of its own."""

    def __init__(self, folder: Path, eos_token_ids: Sequence[int], *, closes_objects: bool = True) -> None:
        """Create the compiler.

        With `closes_objects`, objects of a schema have only the properties that it names unless it says otherwise, also
        for requests that do not ask for it.
        """
        given = {"folder": str(folder), "eos_token_ids": list(eos_token_ids)}
        self._program = Program(PROGRAM, given, MAX_CPU_S, MAX_BYTES)
        self._closes_objects = closes_objects
        self._known: dict[Asked, dict[str, str]] = {}  # answers of the process, most recently used last
        self._begun: dict[tuple[str, Asked], _Compilation] = {}  # by asker

    def begin(self) -> None:
        """Start the helper process, which reads the tokenizer, in the background, so that no request waits for it."""
        self._program.begin()

    async def grammar(
        self,
        params: inference_pb2.SamplingParams,
        leeway: Leeway = NO_LEEWAY,
        prompt_end: str = "",
        asker: str = "",
    ) -> str:
        """Return the grammar of a request's outputs, as serving_core/grammars.py takes it; empty without a constraint.

        `leeway` says what else an output may have, and `prompt_end` is the end of the prompt's text. Waits for other
        grammars of this asker, and for at most one of each other asker. Raises RequestError when the constraint cannot
        be enforced.
        """
        kind = constraint_of(params)
        if kind is None:
            return ""
        whitespace = params.whitespace_pattern if params.HasField("whitespace_pattern") else WHITESPACE
        thoughts = thoughts_behind(prompt_end, leeway.reasoning) if leeway.thinks else Thoughts.NONE
        given = None if params.disable_any_whitespace else whitespace
        closes_objects = self._closes_objects or params.disable_additional_properties
        asked = Asked(kind, _value(params, kind), given, leeway, thoughts, closes_objects)
        answer = self._known.pop(asked, None) or await self._compiled(asker, asked)
        if KILLED not in answer:
            self._known[asked] = answer
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        if "grammar" in answer:
            return answer["grammar"]
        why = answer.get("refused") or f"compiling it {answer['ended']}"
        reason, field = why.partition("\n")[0][:MAX_REASON_CHARS], answer.get("field", kind)
        raise RequestError(BAD_PARAM, f"{field} cannot be enforced: {reason}", field=field)

    async def _compiled(self, asker: str, asked: Asked) -> dict[str, str]:
        """Return the process's answer, shared by all of the asker's concurrent requests for the same grammar.

        When all of these requests are cancelled, nobody waits for the answer.
        """
        key = asker, asked
        if (compilation := self._begun.get(key)) is None:
            task = asyncio.create_task(self._program.ask(asdict(asked), asker))
            compilation = self._begun[key] = _Compilation(task)
        compilation.num_waiting += 1
        try:
            answer = await asyncio.shield(compilation.task)
            if "ended" in answer:
                logger.warning("compiling a %s %s", asked.kind, answer["ended"])
            return answer
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting:
                compilation.task.cancel()
                del self._begun[key]


def constraint_of(params: inference_pb2.SamplingParams) -> str | None:
    """Return the name of the field that constrains the request's output, or None without a constraint."""
    kind = params.WhichOneof("constraint")
    return None if kind is None or (kind == "json_object" and not params.json_object) else str(kind)


def may_begin_blank(params: inference_pb2.SamplingParams) -> bool:
    """Return whether blanks at the start of an output, or after its thoughts, belong to its format."""
    kind = constraint_of(params)
    return kind is not None and constraints.may_begin_blank(kind, _value(params, kind))


def _value(params: inference_pb2.SamplingParams, kind: str) -> Hashable:
    value: Hashable = tuple(params.choice.choices) if kind == "choice" else getattr(params, kind)
    return value
