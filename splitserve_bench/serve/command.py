"""Define `splitserve bench serve`: vLLM's flags where there is one, and how they go together.

What it measures with is imported when the command runs, so that help is quick.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final

import click

from serving_core.errors import SettingsError
from serving_core.net.tls import SCHEME as TLS_SCHEME
from serving_core.net.tls import TlsFiles
from splitserve.commands.server_options import SERVER_VARIABLE, api_key_option, tls_options
from splitserve.signals import run_to_end
from splitserve_bench.options import Command, NumberRange, RepeatingCommand, json_option, option, options_of
from splitserve_bench.serve.arrivals import parse_stages
from splitserve_bench.serve.drawn import DrawnBy
from splitserve_bench.serve.records import BACKENDS, CHATS, COMPLETIONS, LIMITS, OPENAI, SPLITSERVE, Target

RANDOM, AZURE, MOONCAKE, SHAREGPT, CUSTOM = "random", "azure", "mooncake", "sharegpt", "custom"
SESSIONS: Final = "sessions"  # of `bench serve` and `simulate` alone
TRACES: Final = (AZURE, MOONCAKE)
TEXTS: Final = (SHAREGPT, CUSTOM)
DATASETS: Final = (RANDOM, *TRACES, *TEXTS)
MAX_REPEATS: Final = 10
NUM_PROMPTS: Final = 1000  # of a trace all
CAPACITY_REQUESTS: Final = 40
CAPACITY_CONCURRENCY: Final = 8  # of them, and so many requests go before as a warm-up
NUM_TURNS, TURN_INPUT_LEN, THINK_TIME_S = "4", "128", "exp:5"
LOOPBACK: Final = "127.0.0.1"
PORTS: Final = {SPLITSERVE: 50051, OPENAI: 8000}
SCHEME: Final = "://"
OTHER_NAME: Final = re.compile(r"^--(target|base-url)(?==|$)")
WORD: Final = re.compile(r"(?!--).*", re.DOTALL)
ABOVE_0: Final = NumberRange(0, min_open=True)
COUNT, LENGTH = click.IntRange(0), click.IntRange(1)
FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FOLDER: Final = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The flags that say what the requests are, by their names."""

    name: str = RANDOM
    path: str = ""
    length_scale: float = 1.0
    random_input_len: int = 256
    random_output_len: int = 32
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    text_output_len: int | None = None
    skip_chat_template: bool = False
    burstiness: float = 1.0  # not of a trace
    num_turns: str = NUM_TURNS
    turn_input_len: str = TURN_INPUT_LEN
    think_time_s: str = THINK_TIME_S
    num_users: int | None = None
    num_agents: int = 0
    agent_prefix_len: int = 0

    def check(self) -> None:
        """Raise SettingsError when data set, path and lengths do not go together, or a flag is of another data set."""
        check_dataset(self.name, self.path, self.length_scale)
        if self.random_prefix_len and self.name not in (RANDOM, SESSIONS):
            raise SettingsError(
                f"--random-prefix-len {self.random_prefix_len} is of random prompts, not of {self.name}'s"
            )
        if self.name != SESSIONS:
            for flag in ("num_users", "num_agents", "agent_prefix_len"):
                if getattr(self, flag):
                    raise SettingsError(f"--{flag.replace('_', '-')} is of --dataset-name {SESSIONS}")
        if self.text_output_len is not None and self.name not in TEXTS:
            raise SettingsError(
                f"--sharegpt-output-len {self.text_output_len} is of outputs of texts, not of {self.name}'s"
            )
        if self.skip_chat_template and self.name != CUSTOM:
            raise SettingsError(f"--skip-chat-template is of {CUSTOM}: prompts of {self.name} have none around them")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The values of all flags, by their names."""

    backend: str | None
    server: str | None
    host: str | None
    port: int | None
    endpoint: str
    model: str
    api_key: str | None
    tls_ca: str
    tls_cert: str
    tls_key: str
    extra_body: str
    tokenizer: Path | None
    vocab_size: int | None
    ignore_eos: bool
    dataset_name: str
    dataset_path: Path | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_prefix_len: int
    text_output_len: int | None
    skip_chat_template: bool
    num_prompts: int | None
    request_rate: float
    burstiness: float
    stages: str | None
    attainment: float
    length_scale: float
    num_turns: str
    turn_input_len: str
    think_time_s: str
    num_users: int | None
    num_agents: int
    agent_prefix_len: int
    max_concurrency: int | None
    num_warmups: int
    request_timeout_s: float
    seed: int
    obey_retry_after: int
    goodput: tuple[str, ...]
    send_limits: bool
    percentile_metrics: str
    metric_percentiles: str
    label: str | None
    num_gpus: int | None
    metadata: tuple[str, ...]
    save_result: bool
    save_detailed: bool
    result_dir: Path
    result_filename: str | None
    plots: Path | None
    as_json: bool

    @property
    def dataset(self) -> Dataset:
        """Return the flags about the data set."""
        return dataset_of({each.name: getattr(self, each.name) for each in fields(self)})

    @property
    def wants_capacity(self) -> bool:
        """Return whether the stages are multiples of a rate that has to be measured first."""
        return self.stages is not None and math.isinf(self.request_rate)

    def check(self) -> None:
        """Raise SettingsError as `check_flags`, and when a data set of texts has no tokenizer."""
        self.check_flags()
        if self.dataset_name in TEXTS and self.tokenizer is None:
            raise SettingsError(f"--dataset-name {self.dataset_name} needs the model's tokenizer: --tokenizer FOLDER")

    def check_flags(self) -> None:
        """Raise SettingsError when the data set does not fit its flags, or --send-limits has no limits."""
        self.dataset.check()
        if self.send_limits and not self.goodput:
            raise SettingsError("--send-limits tells the limits of --goodput, and there are none")

    def check_pace(self) -> None:
        """Raise SettingsError for flags about when requests are sent that contradict one another or have no effect."""
        if self.stages is not None:
            others = {
                f"--dataset-name {SESSIONS}": self.dataset_name == SESSIONS,
                "--num-prompts": self.num_prompts is not None,
                "--max-concurrency": self.max_concurrency is not None,
            }
            if given := [flag for flag, is_given in others.items() if is_given]:
                raise SettingsError(
                    f"--stages say when requests are sent, and how many: {given[0]} does not go with them"
                )
            if not self.goodput:
                raise SettingsError(
                    "--stages without limits: nothing is late. Give --goodput, such as ttft:500 tpot:40"
                )
            parse_stages(self.stages)
            return
        check_burstiness(self.dataset_name, self.burstiness)

    @property
    def backend_name(self) -> str:
        """Return the backend that the flags name, else the one that the address and the endpoint belong to."""
        is_openai = SCHEME in (self.server or "") or self.endpoint.endswith(CHATS)
        return self.backend or (OPENAI if is_openai else SPLITSERVE)

    @property
    def takes_chats(self) -> bool:
        """Return whether prompts are sent as conversations."""
        return self.backend_name == OPENAI and self.endpoint.endswith(CHATS)

    def where(self) -> Target:
        """Return the server to send to. Raises SettingsError for flags about it that contradict one another."""
        backend = self.backend_name
        if self.server and (self.host or self.port):
            raise SettingsError(f"--server ({self.server}) says where: --host and --port are instead of it")
        address = self.server or f"{self.host or LOOPBACK}:{self.port or PORTS[backend]}"
        if backend == SPLITSERVE and SCHEME in address and not address.startswith(TLS_SCHEME):
            raise SettingsError(
                f"--server {address} is a URL, which --backend {OPENAI} takes; gRPC has HOST:PORT or https://HOST:PORT"
            )
        if backend == OPENAI:
            if self.server and SCHEME not in address:
                raise SettingsError(f"--server {address} is no URL: --backend {OPENAI} takes http://HOST:PORT")
            scheme = "https" if self.tls_ca else "http"
            address = (address if self.server else f"{scheme}://{address}").rstrip("/")
        extra_body = _object(self.extra_body)
        if backend == SPLITSERVE and (unknown := sorted(extra_body.keys() - set(LIMITS))):
            raise SettingsError(f"--extra-body may have {', '.join(LIMITS)} for SplitServe's gRPC, not {unknown[0]!r}")
        tls = TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)
        return Target(backend, address, self.endpoint, self.model, self.api_key, extra_body, tls)

    def metadata_pairs(self) -> dict[str, str]:
        """Return the pairs of --metadata. Raises SettingsError for a value that is not KEY=VALUE."""
        pairs = [pair.partition("=") for pair in self.metadata]
        for name, separator, value in pairs:
            if not name or not separator:
                raise SettingsError(f"--metadata is KEY=VALUE, not {name + separator + value!r}")
        return {name: value for name, _, value in pairs}


def dataset_of(values: Mapping[str, Any]) -> Dataset:
    """Return the Dataset of these values of flags, which are by name; nothing is checked.

    "dataset_name" and "dataset_path" are needed; other fields of Dataset may be missing, other values are ignored.
    """
    return Dataset(values["dataset_name"], str(values["dataset_path"] or ""), **named(Dataset, values))


def named(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values that have the name of a field of this dataclass."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def check_dataset(name: str, path: Path | str | None, length_scale: float) -> None:
    """Raise SettingsError when the data set, its path and the length scale do not go together.

    That is a data set that needs a path and has none, a path for random prompts, and a length scale other than 1 for a
    data set that is no trace. The file itself is not read.
    """
    if name == RANDOM and path:
        raise SettingsError(f"--dataset-path is of a data set that is a file: --dataset-name {RANDOM} is none")
    if name not in TRACES and length_scale != 1:
        raise SettingsError(f"--length-scale {length_scale:g} is of a trace's lengths: {name} has lengths of its own")
    if name not in (RANDOM, SESSIONS) and not path:
        raise SettingsError(f"--dataset-name {name} needs a {'trace' if name in TRACES else 'file'}: --dataset-path")


def check_burstiness(dataset_name: str, burstiness: float) -> None:
    """Raise SettingsError for a burstiness other than 1 of a trace, which has its own."""
    if dataset_name in TRACES and burstiness != 1:
        raise SettingsError(f"--burstiness {burstiness:g} is of random arrivals: a trace has bursts of its own")


class ServeCommand(RepeatingCommand):
    """The command, whose flags of lists take several words, as it has no arguments.

    --target and --base-url mean --server.
    """

    lists: ClassVar = {"--goodput": WORD, "--metadata": WORD}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [OTHER_NAME.sub("--server", word) for word in args])


def tokenizer_option(words: str) -> Callable[[Command], Command]:
    return option("--tokenizer", type=FOLDER, help=words)


def send_limits_option(*, default: bool) -> Callable[[Command], Command]:
    words = "Tell SplitServe which TTFT and TPOT each request is judged by; other servers are never told."
    return option("--send-limits/--no-send-limits", default=default, help=words)


length_scale_option: Final = option(
    "--length-scale", default=1.0, type=ABOVE_0, help="Multiply the lengths of a trace by this factor."
)
burstiness_option: Final = option(
    "--burstiness",
    default=1.0,
    type=ABOVE_0,
    help="Let requests come in bursts (below 1), as a Poisson process (1) or evenly (above).",
)


def shape_options(input_len: int, output_len: int, *others: str) -> Callable[[Command], Command]:
    """Return the flags of a data set; random requests have these lengths in tokens by default.

    `others` are data sets beside DATASETS.
    """
    return options_of(
        option("--dataset-name", default=RANDOM, type=click.Choice((*DATASETS, *others))),
        option(
            "--dataset-path",
            type=FILE,
            help="Read the data set from this file: Azure's CSV, Mooncake's JSON lines, ShareGPT's JSON, or "
            "JSON lines with prompt and, optional, output_tokens.",
        ),
        length_scale_option,
        option("--random-input-len", default=input_len, type=LENGTH, help="Send prompts of this many tokens."),
        option("--random-output-len", default=output_len, type=LENGTH, help="Ask for outputs of this many tokens."),
        option(
            "--random-range-ratio",
            default=0.0,
            type=NumberRange(0, 1, max_open=True),
            help="Let lengths differ by up to this share of them.",
        ),
        option(
            "--random-prefix-len",
            default=0,
            type=COUNT,
            help="Begin all random prompts with the same tokens, this many beside --random-input-len.",
        ),
        option(
            "--sharegpt-output-len",
            "--custom-output-len",
            "text_output_len",
            type=LENGTH,
            help=f"Ask for outputs of this many tokens in {SHAREGPT} and {CUSTOM}; default: what the file says.",
        ),
        option(
            "--skip-chat-template",
            "--custom-skip-chat-template",
            "skip_chat_template",
            is_flag=True,
            help=f"Prompts of {CUSTOM} are sent as they stand, without the model's chat template around them.",
        ),
        burstiness_option,
    )


def client_options(timeout_s: float) -> Callable[[Command], Command]:
    return options_of(
        option(
            "--request-timeout-s",
            default=timeout_s,
            type=ABOVE_0,
            help="Count a request that takes more than this many seconds as a miss.",
        ),
        option(
            "--seed",
            default=0,
            help="Draw prompts, lengths and arrivals by this seed; take another one when the server keeps "
            "the KV of an earlier run.",
        ),
    )


# The server.
where_options = options_of(
    option(
        "--server",
        envvar=SERVER_VARIABLE,
        show_envvar=True,
        help="Load this server: HOST:PORT of SplitServe's gRPC, or http://HOST:PORT of a server with OpenAI's API; "
        f"default: {LOOPBACK}:{PORTS[SPLITSERVE]}, with --backend {OPENAI} http://{LOOPBACK}:{PORTS[OPENAI]}.",
    ),
    option(
        "--backend",
        type=click.Choice(BACKENDS),
        help="Speak this API; default: the one that --server is an address of.",
    ),
    option("--host", hidden=True),  # vLLM's, instead of --server
    option("--port", hidden=True, type=click.IntRange(1, 65535)),
    option(
        "--endpoint",
        default=COMPLETIONS,
        help=f"Send requests to this path of an OpenAI-compatible server; /v1{CHATS} too.",
    ),
    option("--model", default="", help="Ask this model; default: what is served."),
    api_key_option,
    tls_options,
    option(
        "--extra-body",
        default="{}",
        help="Add the fields of this JSON object to each request: of an OpenAI-compatible server, or limits.",
    ),
    tokenizer_option(
        f"Use the tokenizer of this model folder for the lengths of {SHAREGPT} and {CUSTOM}, and for random prompts in "
        "chats or where the server does not tell its vocabulary; default: that of the served model, where its name is "
        "a folder or cached hub id here."
    ),
    option("--vocab-size", type=LENGTH, help="Draw random prompts from this many tokens."),
)
ignore_eos_option = option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    help="Let outputs go on after the end-of-sequence token, to their full length.",
)

# What is sent when.
DRAWN: Final = DrawnBy()
session_options = options_of(
    option("--num-turns", default=NUM_TURNS, type=DRAWN, help="Let a session have so many turns."),
    option(
        "--turn-input-len",
        default=TURN_INPUT_LEN,
        type=DRAWN,
        help="Add so many tokens to a session in each turn but the first.",
    ),
    option(
        "--think-time-s",
        default=THINK_TIME_S,
        type=DRAWN,
        help="Wait so many seconds before each turn but the first.",
    ),
    option(
        "--num-users",
        type=LENGTH,
        help="Let this many users have one session after the other; default: a session starts when it is due.",
    ),
    option(
        "--num-agents",
        default=0,
        type=COUNT,
        help="Let this many sub-agents continue the first turn of each session at once; the second waits for them.",
    ),
    option(
        "--agent-prefix-len",
        default=0,
        type=COUNT,
        help="Begin the prompts of the sub-agents of a session with the same tokens, this many.",
    ),
)
dataset_options = options_of(
    shape_options(1024, 128, SESSIONS),
    session_options,
    option(
        "--num-prompts",
        type=LENGTH,
        help=f"Send this many requests, or sessions; default: {NUM_PROMPTS}, of a trace all.",
    ),
)
pace_options = options_of(
    option("--max-concurrency", type=LENGTH, help="Send at most this many requests at the same time; the rest wait."),
    client_options(600.0),
)
stages_options = options_of(
    option(
        "--stages",
        metavar="TIMESxSECONDS,...",
        help="Send the load in stages: multiples of --request-rate, each with its seconds, such as 0.7x20,3x30,0.7x40. "
        "Needs --goodput. Without "
        f"--request-rate they are multiples of the capacity, which is measured first: {CAPACITY_REQUESTS} requests, "
        f"{CAPACITY_CONCURRENCY} at a time.",
    ),
    option(
        "--attainment",
        default=0.9,
        type=NumberRange(0, 1, min_open=True),
        help="Count goodput as back, after the highest of the --stages, from this share of good requests on.",
    ),
)
obey_retry_after_option = option(
    "--obey-retry-after",
    is_flag=False,
    flag_value=1,
    default=0,
    type=click.IntRange(0, MAX_REPEATS),
    help="Send a request again, at most this many times (1 without a number), that is refused and "
    "told when to come back within --request-timeout-s. The last sending is judged.",
)
load_options = options_of(
    dataset_options,
    option(
        "--request-rate",
        default=math.inf,
        type=ABOVE_0,
        help="Send this many requests a second; inf sends all at once, and a trace at its own times.",
    ),
    pace_options,
    option("--num-warmups", default=0, type=COUNT, help="Send this many requests before, which do not count."),
)

# What is made of it.
goodput_option = option(
    "--goodput", multiple=True, help="Judge requests by these limits in ms, such as ttft:500 tpot:30 e2el:9000."
)
result_options = options_of(
    goodput_option,
    option(
        "--percentile-metrics", default="ttft,tpot,itl", help="Show these figures, of ttft, tpot, itl, e2el and ttst."
    ),
    option("--metric-percentiles", default="99", help="Show these percentiles, with commas between them."),
    option("--label", help="Begin the result's name with this label; default: the backend."),
    option("--num-gpus", type=LENGTH, help="Divide goodput by this many GPUs of all nodes."),
    option("--metadata", multiple=True, help="Add KEY=VALUE to the result; several may follow."),
    option("--save-result", is_flag=True, help="Write the figures to a JSON file."),
    option(
        "--save-detailed", is_flag=True, help="Write every request too, and beside the file one JSON line for each."
    ),
    option("--result-dir", default=".", type=NEW_FOLDER, help="Write results to this folder, which is made."),
    option("--result-filename", help="Name the result file so, instead of LABEL-RATEqps-MODEL-TIME.json."),
    option("--plots", type=NEW_FOLDER, help="Draw pictures (PNG) into this folder."),
    json_option,
)


@click.command("serve", cls=ServeCommand)
@where_options
@ignore_eos_option
@load_options
@stages_options
@obey_retry_after_option
@send_limits_option(default=False)
@result_options
def serve_command(**flags: Any) -> None:
    """Send a load to a running server: latencies, throughput, and the share of requests within their limits."""
    from splitserve_bench.serve.run import serve

    run_to_end(serve(ServeOptions(**flags)))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"--extra-body is a JSON object, not {text[:80]}")
    return value
