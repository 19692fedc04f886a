"""Whom a load is sent to, and what it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from serving_core.tls import TlsFiles

SPLITSERVE, OPENAI = "splitserve", "openai"
BACKENDS: Final = (SPLITSERVE, OPENAI)
COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/chat/completions"  # ends the path of an endpoint that takes conversations
LIMITS: Final = ("ttft_ms", "tpot_ms", "slo_class", "priority")  # of every request, the same for both backends


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `address` is HOST:PORT for splitserve, or https://HOST:PORT, and a URL without the endpoint for
    openai."""

    backend: str  # one of BACKENDS
    address: str
    endpoint: str = COMPLETIONS  # of openai
    model: str = ""  # "": whatever is served
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(
        default_factory=dict
    )  # more fields of every request; of splitserve LIMITS alone
    tls: TlsFiles = field(default_factory=TlsFiles)

    @property
    def takes_chats(self) -> bool:
        """Whether each prompt is a conversation of one message, as text."""
        return self.backend == OPENAI and self.endpoint.endswith(CHATS)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of its model; None for what it does not say."""

    model: str
    max_model_len: int | None
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is, some time after its start."""

    num_planned: int
    num_sent: int
    num_completed: int
    num_failed: int  # refused, timed out, broken
    num_output_tokens: int  # of the answers that ended
    elapsed_s: float

    @property
    def num_in_flight(self) -> int:
        return self.num_sent - self.num_completed - self.num_failed
