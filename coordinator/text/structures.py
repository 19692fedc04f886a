"""What clients want answers to be, as grammars for the nodes; what cannot be enforced is refused."""

import asyncio
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.text.program import Program
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

logger = logging.getLogger(__name__)

PROGRAM: Final = "coordinator.text.compiling"
MAX_CPU_S: Final = 1.0  # for one grammar
MAX_REASON_CHARS: Final = 300
MAX_KNOWN: Final = 32
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"  # bounded: some models write blanks without end


@dataclass(slots=True)
class _Compilation:
    """One that has begun, or waits for its turn."""

    task: asyncio.Task[dict[str, str]]
    num_waiting: int = 0


class Structures:
    """Makes grammars for answers of one model, one at a time, in a process of its own."""

    def __init__(self, folder: Path, eos_token_ids: Sequence[int]) -> None:
        self._program = Program(PROGRAM, {"folder": str(folder), "eos_token_ids": list(eos_token_ids)}, MAX_CPU_S)
        self._known: dict[Hashable, str] = {}  # grammars by what was asked for, that which was asked for last behind
        self._begun: dict[Hashable, _Compilation] = {}

    async def grammar(self, params: inference_pb2.SamplingParams) -> str:
        """The grammar of the answers, in the form of serving_core/grammars.py; empty where they may be anything. Raises
        RequestError where it cannot be enforced."""
        kind = constraint_of(params)
        if kind is None:
            return ""
        whitespace = params.whitespace_pattern if params.HasField("whitespace_pattern") else WHITESPACE
        asked = (kind, _value(params, kind), None if params.disable_any_whitespace else whitespace)
        if (made := self._known.pop(asked, None)) is None:
            made = await self._made(*asked)
        self._known[asked] = made
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return made

    async def _made(self, kind: str, *how: Hashable) -> str:
        answer = await self._compiled(kind, *how)
        if "grammar" in answer:
            return answer["grammar"]
        if "ended" in answer:
            logger.warning("compiling a %s %s", kind, answer["ended"])
        why = answer.get("refused") or f"compiling it {answer['ended']}"
        reason = why.partition("\n")[0][:MAX_REASON_CHARS]
        raise RequestError(BAD_PARAM, f"{kind} cannot be enforced: {reason}", field=kind)

    async def _compiled(self, *asked: Hashable) -> dict[str, str]:
        """The program's answer, for all who ask the same meanwhile; it is not waited for when all of them have left."""
        if (compilation := self._begun.get(asked)) is None:
            question = dict(zip(("kind", "value", "whitespace"), asked, strict=True))
            compilation = self._begun[asked] = _Compilation(asyncio.create_task(self._program.ask(question)))
        compilation.num_waiting += 1
        try:
            return await asyncio.shield(compilation.task)
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting:
                compilation.task.cancel()
                del self._begun[asked]


def constraint_of(params: inference_pb2.SamplingParams) -> str | None:
    """Which constraint there is, by its field; None without any."""
    kind = params.WhichOneof("constraint")
    return None if kind is None or (kind == "json_object" and not params.json_object) else str(kind)


def _value(params: inference_pb2.SamplingParams, kind: str) -> Hashable:
    value: Hashable = tuple(params.choice.choices) if kind == "choice" else getattr(params, kind)
    return value
