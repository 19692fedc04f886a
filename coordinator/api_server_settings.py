"""Define the settings of an API server process: those of the coordinator, and its place among the API servers."""

from dataclasses import dataclass, field

from coordinator.settings import CoordinatorSettings
from serving_core.flags import flag


@dataclass(frozen=True, slots=True)
class ApiServerSettings:
    """Settings of one API server process."""

    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    control_socket: str = flag("", "Path of the socket of the control process.")
    api_server_number: int = flag(0, "Number of this API server, from 1.", minimum=0)
