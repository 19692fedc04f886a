"""Define the settings of an API server process: those of the coordinator, and where that is."""

from dataclasses import dataclass, field

from coordinator.settings import CoordinatorSettings
from serving_core.flags import flag


@dataclass(frozen=True, slots=True)
class ApiServerSettings:
    """Settings of one API server, beside those of the coordinator."""

    served: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    coordinator: str = flag("127.0.0.1:50052", "Fleet address of the coordinator, HOST:PORT or unix:PATH.")
    api_server_number: int = flag(
        0,
        "Number of this API server among those that its coordinator has started and that end with it, from 1; 0: it "
        "was started by itself and waits for whichever coordinator is at the address.",
        minimum=0,
    )
