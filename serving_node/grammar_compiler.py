"""Compile the grammars of requests in a thread of their own."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from serving_core.process.telemetry import about
from serving_core.reasons import ENGINE_ERROR
from serving_core.requests import Guide, Request
from serving_core.tasks import Turns
from serving_node.decisions import CompileGrammar

logger = logging.getLogger(__name__)

CANNOT_COMPILE: Final = RequestError(ENGINE_ERROR, "the node cannot compile the grammar")


class GrammarCompiler:
    """Compiles the grammars of requests, one at a time; clients take turns. Belongs to one event loop."""

    def __init__(self, grammars: Grammars, on_compiled: Callable[[Request, Guide | RequestError], None]) -> None:
        """Create the compiler, which from then on uses `grammars` in a thread of its own.

        `on_compiled` is called in the event loop with the request and its guide, or the error.
        """
        self._grammars = grammars
        self._on_compiled = on_compiled
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._turns = Turns()
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, decision: CompileGrammar) -> None:
        task = asyncio.create_task(self._compile(decision.request, decision.asker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def warm_up(self) -> None:
        """Load the tokenizer in the thread, which would delay all sequences at the first grammar."""
        self._thread.submit(self._read_tokenizer)

    def _read_tokenizer(self) -> None:
        with suppress(RequestError):  # every grammar will fail with the same error
            self._grammars.load()

    async def _compile(self, request: Request, asker: str) -> None:
        """Compile a grammar, also of a request that ends meanwhile: it is short, since the coordinator has tried it."""
        result: Guide | RequestError = CANNOT_COMPILE
        try:
            async with self._turns.turn(asker):
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._thread, self._grammars.guide_of, request.sampling.grammar)
        except RequestError as refusal:
            result = refusal
        except Exception:
            logger.exception("a grammar was not compiled", extra=about(request.request_id))
        self._on_compiled(request, result)
