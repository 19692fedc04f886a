"""What an API server process is told, beside the coordinator's own settings."""

from dataclasses import dataclass, field

from coordinator.settings import CoordinatorSettings
from serving_core.flags import flag


@dataclass(frozen=True, slots=True)
class ApiServerSettings:
    """Settings of one API server."""

    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    control_socket: str = flag("", "Path of the socket at which control is asked.")
    api_server_number: int = flag(0, "Which of the API servers this one is.", minimum=0)
