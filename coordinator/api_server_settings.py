"""Define the settings of an API server process: those of the coordinator, and where that is."""

from dataclasses import dataclass, field

from coordinator.settings import CoordinatorSettings
from serving_core.flags import flag


@dataclass(frozen=True, slots=True)
class ApiServerSettings:
    """Settings of one API server, beside those of the coordinator."""

    served: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    coordinator: str = flag(
        "127.0.0.1:50052", "Connect to the coordinator's fleet port at this address: HOST:PORT or unix:PATH."
    )
    api_server_number: int = flag(
        0,
        "Be this number, from 1, of the API servers that a coordinator has started and that end with it; "
        "0: started by itself, for whichever coordinator is at the address.",
        minimum=0,
    )
