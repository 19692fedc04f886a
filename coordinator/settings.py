"""Define the settings of the coordinator. Flags derive from these fields; their names follow vLLM's."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coordinator.control.placement.costs import FETCH_AUTO, PREFIX_FETCHES
from coordinator.control.placement.policy import AUTO as AUTO_POLICY
from coordinator.control.placement.policy import POLICIES
from coordinator.control.roles import AUTO, FIXED
from coordinator.control.slo import parse_slo_classes
from coordinator.text.answer_format import AUTO as AUTO_FORMAT
from coordinator.text.answer_format import CALL_FORMATS, REASONING_FORMATS
from coordinator.text.rendering import BadField, read_kwargs
from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_core.net.api_keys import read_api_keys
from serving_core.net.ports import check_exposure
from serving_core.net.tls import SERVER, TlsError, TlsSettings, check_open, check_purpose
from serving_core.process.extras import require
from serving_core.process.telemetry import LogSettings
from serving_core.settings import MODEL_IMPLS, RUNNERS

ADMIT_ALL, ADMIT_TIMELY = "all", "timely"
MOST_LOGPROBS: Final = 1000  # those of a step of 1024 sequences still fit in one message to the fleet port
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")  # as browsers send it, without a path
_ENDPOINT: Final = re.compile(r"https?://[^/?#@\s]+:\d{1,5}/?")


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of the coordinator."""

    model: str = flag("", "Read config.json and the tokenizer's files from this model folder.", positional=True)
    host: str = flag("127.0.0.1", "Listen for gRPC clients at this address.")
    grpc_port: int = flag(50051, "Listen for gRPC clients at this port; 0 takes a free one.", minimum=0, maximum=65535)
    fleet_host: str = flag("127.0.0.1", "Listen for nodes at this address.")
    fleet_port: int = flag(50052, "Listen for nodes at this port; 0 takes a free one.", minimum=0, maximum=65535)
    http_host: str = flag("127.0.0.1", "Listen for HTTP clients at this address.")
    http_port: int = flag(
        8000,
        "Listen for HTTP clients, of OpenAI's and Anthropic's APIs, at this port; 0 takes a free one, -1 none.",
        minimum=-1,
        maximum=65535,
    )
    api_server_count: int = flag(
        1,
        "Run this many API server processes, which tokenize, detokenize and stream, at the same ports; "
        "1: the coordinator does so itself.",
        minimum=1,
        maximum=64,
    )
    standby: bool = flag(
        False,
        "Wait while another coordinator of this machine serves at these ports, and take its place when "
        "it ends. Nodes and API servers that were started by themselves attach again, and streams go on.",
    )
    standby_lease: str = flag(
        "",
        "Let the Lease of this name, of Kubernetes, decide which coordinator of the pod's namespace serves, with "
        "--standby; the service account must be allowed to get, create and update leases.",
    )
    stream_interval: int = flag(
        1,
        "Send this many tokens in one message of a stream, after its first token; the last message may have fewer.",
        minimum=1,
        maximum=256,
    )
    served_model_name: str = flag(
        "",
        "Let clients call the model by these names, separated by commas; responses have the first. "
        "Default: the folder's name.",
    )
    api_key: str = flag("", "Require this secret of clients; an address off loopback needs one.", secret=True)
    api_keys_file: str = flag(
        "",
        "Accept the API keys of this file too, one a line: NAME KEY, or a key alone. SIGHUP rereads it; "
        "names are logged.",
    )
    admin_key: str = flag(
        "",
        "Require this secret, which also serves as an API key, for roles, drains and the overview; "
        "default: any API key is enough.",
        secret=True,
    )
    fleet_secret: str = flag("", "Require this secret of nodes; an address off loopback needs one.", secret=True)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tls_verify_clients: bool = flag(False, "Require a client certificate signed by --tls-ca, over gRPC and HTTP.")
    allowed_origins: str = flag(
        "",
        "Let web pages of these origins call the HTTP port: such as https://example.org, separated by commas, or *.",
    )
    ui: bool = flag(True, "Serve a page that shows the state of the cluster, at /ui of the HTTP port.")
    instance_id: str = flag(
        "", "Tell clients this id of the server's run in GetServerInfo; default: random characters."
    )
    max_model_len: int = flag(
        0, "Allow at most this many tokens of prompt and output together; 0 takes what the nodes allow.", minimum=0
    )
    model_impl: str = flag(
        "auto",
        "Compute with this model code on the nodes; auto takes SplitServe's own where it supports the architecture.",
        choices=MODEL_IMPLS,
    )
    runner: str = flag(
        "auto",
        "Generate tokens (generate) or compute embeddings (pooling); auto decides by the model's folder.",
        choices=RUNNERS,
    )
    chat_template: str = flag("", "Use the chat template of this file instead of the model's own.")
    chat_template_kwargs: str = flag(
        "",
        'Set these variables of the chat template where a request does not: JSON such as {"enable_thinking": false}.',
    )
    tool_call_parser: str = flag(
        AUTO_FORMAT,
        "Parse tool calls in this format, by vLLM's names; auto detects it from the chat template.",
        choices=CALL_FORMATS,
    )
    reasoning_parser: str = flag(
        AUTO_FORMAT,
        "Parse reasoning at the start of outputs in this format, by vLLM's names (think: <think> and "
        "</think>); auto detects it from the chat template.",
        choices=REASONING_FORMATS,
    )
    disable_additional_properties: bool = flag(
        True,
        "Allow no other properties in an object of a JSON schema that names properties and does not "
        "mention additionalProperties, in structured output and tool calls; off: allow any others, as "
        "JSON Schema does.",
    )
    generation_config: str = flag(
        "auto",
        "Take default sampling parameters from the model's generation_config.json (auto), or neutral ones (none).",
        choices=("auto", "none"),
    )
    strict_fields: bool = flag(False, "Refuse requests with unknown fields instead of logging a warning.")
    max_num_queued_reqs: int = flag(
        1024, "Hold at most this many sequences, waiting and running; refuse more.", minimum=1
    )
    max_num_queued_reqs_per_key: int = flag(
        0,
        "Hold at most this many sequences for the API keys of one name, and for all without a name; 0 "
        "sets no such limit.",
        minimum=0,
    )
    max_connections: int = flag(
        0,
        "Accept at most this many connections at the gRPC port, and as many at the HTTP port; 0 goes by "
        "the limit on open files.",
        minimum=0,
    )
    max_connections_per_peer: int = flag(
        0,
        "Accept at most this many connections of one address, such as a proxy's, at the HTTP port, and "
        "at the gRPC port where there are API keys; 0 takes half of all.",
        minimum=0,
    )
    max_logprobs: int = flag(
        20, "Let requests ask for at most this many top logprobs.", minimum=0, maximum=MOST_LOGPROBS
    )
    roles: str = flag(
        FIXED,
        "Keep the roles of nodes (fixed), or change them with the load (auto).",
        choices=(FIXED, AUTO),
    )
    policy: str = flag(
        AUTO_POLICY,
        "Place requests where the fewest miss their SLO, then where they cost the fewest seconds (auto); "
        "by the seconds alone (sum); never or always on two nodes; or by a baseline to compare with.",
        choices=tuple(POLICIES),
    )
    remote_prefix_fetch: str = flag(
        FETCH_AUTO,
        "Fetch cached blocks of a prompt from another node where that is measured to be faster than "
        "computing them (auto), always or never.",
        choices=PREFIX_FETCHES,
    )
    admission: str = flag(
        ADMIT_ALL,
        "Admit all requests with an SLO, late ones behind the others (all); or only those that make none "
        "late, and refuse others with a retry-after (timely).",
        choices=(ADMIT_ALL, ADMIT_TIMELY),
    )
    max_queue_wait_s: float = flag(
        30.0,
        "Refuse a request with a retry-after if it is expected to wait more than this many seconds for "
        "its first token; 0 sets no limit.",
        minimum=0.0,
    )
    slo_class: tuple[str, ...] = flag(
        (),
        "Define an SLO class that requests may name: NAME=ttft:500,tpot:40,priority:-1 with limits in "
        "ms, or NAME=ttft:5x,tpot:1.5x with multiples of the time that a request takes alone; lower "
        "priorities go first. May be repeated.",
    )
    max_restarts: int = flag(
        2, "Restart one sequence at most this many times on other nodes after failures.", minimum=0
    )
    node_wait_s: float = flag(
        5.0,
        "Let a request wait this many seconds for a node that can take it, while there is none; 0 refuses it.",
        minimum=0.0,
    )
    keep_after_s: float = flag(
        2.0,
        "Let a prefill node decode a prompt itself when it has waited this many seconds for the credit "
        "of a decode node.",
        minimum=0.1,
    )
    heartbeat_s: float = flag(1.0, "Let each node send a heartbeat after this many seconds.", minimum=0.01)
    node_timeout_s: float = flag(
        4.5,
        "Count a node as lost after this many seconds without a heartbeat, or after four times the "
        "longest recent gap between its heartbeats where that is more, and at most five times this.",
        minimum=0.02,
    )
    step_timeout_s: float = flag(120.0, "Count a node as stuck after this many seconds in one step.", minimum=1.0)
    request_timeout_s: float = flag(
        600.0, "End an output that takes more than this many seconds from the arrival of its request.", minimum=0.1
    )
    drain_s: float = flag(
        30.0, "Wait this many seconds for requests to finish when the coordinator stops.", minimum=0.0
    )
    otlp_endpoint: str = flag(
        "", "Send traces of requests to this OTLP endpoint over gRPC: http://HOST:4317, or https; default: no traces."
    )
    log: LogSettings = field(default_factory=LogSettings)


def check_settings(settings: CoordinatorSettings) -> None:
    """Raise SettingsError for settings that are unsafe, malformed or contradict each other."""
    if settings.node_timeout_s <= settings.heartbeat_s:
        raise SettingsError(
            f"node_timeout_s ({settings.node_timeout_s:g}) must be above heartbeat_s ({settings.heartbeat_s:g})"
        )
    if settings.api_server_count > 1 and sys.platform != "linux":
        raise SettingsError(
            f"API servers ({settings.api_server_count}) must be 1 here: only Linux divides a port's connections fairly"
        )
    if settings.standby and (sys.platform != "linux" or 0 in (settings.grpc_port, settings.fleet_port)):
        raise SettingsError("standby needs Linux, and ports of its own choice: --grpc-port and --fleet-port above 0")
    if settings.standby_lease and not settings.standby:
        raise SettingsError(f"standby_lease ({settings.standby_lease}) needs --standby")
    origins(settings.allowed_origins)
    parse_slo_classes(settings.slo_class)
    _check_template_kwargs(settings.chat_template_kwargs)
    model_names(settings.served_model_name)
    _check_endpoint(settings.otlp_endpoint)
    keys = api_keys(settings)
    check_exposure(settings.host, "api_key", "".join(keys))
    check_exposure(settings.http_host, "api_key", "".join(keys))
    check_exposure(settings.fleet_host, "fleet_secret", settings.fleet_secret)
    _check_tls(settings)


def _check_template_kwargs(text: str) -> None:
    try:
        read_kwargs(text)
    except BadField as error:
        raise SettingsError(f"chat_template_kwargs {error.problem}") from error


def _check_endpoint(endpoint: str) -> None:
    if not endpoint:
        return
    if not _ENDPOINT.fullmatch(endpoint):
        raise SettingsError(f"otlp_endpoint must be http://HOST:PORT or https://HOST:PORT, not {endpoint!r:.200}")
    require("otel")


def _check_tls(settings: CoordinatorSettings) -> None:
    files = settings.tls.files
    if files.ca and not files.cert:
        raise TlsError("--tls-ca is for ports with a certificate: --tls-cert and --tls-key are missing")
    if settings.tls_verify_clients and not files.ca:
        raise TlsError("--tls-verify-clients needs the CA of the clients' certificates: --tls-ca is missing")
    if not files.ca:
        check_open("the fleet port without --tls-ca", settings.fleet_host, settings.tls)
    check_purpose(files, SERVER)


def api_keys(settings: CoordinatorSettings) -> dict[str, str]:
    """Return the API keys as a map of key to holder name, from the settings and from the file as it is now.

    Raises SettingsError when the file cannot be read, or the admin key is one of the API keys.
    """
    holders = read_api_keys(Path(settings.api_keys_file)) if settings.api_keys_file else {}
    if settings.api_key:
        holders = {settings.api_key: "", **holders}
    if settings.admin_key and settings.admin_key in holders:
        raise SettingsError("admin_key is one of the API keys, which clients hold: it must be another secret")
    return holders


def model_names(text: str) -> list[str]:
    """Return the comma-separated names of `served_model_name` as a list, empty for an empty text.

    Raises SettingsError for an empty or repeated name.
    """
    found = [part.strip() for part in text.split(",")] if text else []
    if not all(found) or len(set(found)) < len(found):
        raise SettingsError(f"served_model_name must be names with commas between them, each once, not {text!r:.200}")
    return found


def origins(text: str) -> list[str]:
    """Return the comma-separated origins of `allowed_origins` as a list.

    Raises SettingsError for a text that is neither * nor an origin such as https://example.org:8080.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            message = f"allowed_origins must be * or origins such as https://example.org:8080, not {origin!r}"
            raise SettingsError(message)
    return found
