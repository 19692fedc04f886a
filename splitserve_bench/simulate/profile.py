"""Hold what a node, transfers and the control plane cost on a machine, as `splitserve doctor --save` measured it."""

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from serving_core.errors import ModelError, SettingsError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.layout import KVLayout
from splitserve_bench.report import save_json


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds by two quantities, each measured at one or more ascending places: seconds[row][column]."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        """Return the seconds at a row and a column.

        Interpolates linearly between measured places. Before the first place the value is that of the first; beyond the
        last it is extrapolated from the last two, but never below the last.
        """
        return self.row(row).at(column)

    def row(self, row: float) -> "Row":
        """Return the seconds at one place of the first quantity, for all places of the second."""
        lower, upper, share = _between(self.rows, row)
        return Row(self.columns, self.seconds[lower], self.seconds[upper], share)


class Row:
    """The seconds along a line between two rows of a grid, for more than one column."""

    def __init__(self, columns: Sequence[float], below: Sequence[float], above: Sequence[float], share: float) -> None:
        self._columns, self._below, self._above, self._share = columns, below, above, share

    def at(self, column: float) -> float:
        """Return the seconds at a column, interpolated between measured places.

        Before the first place it is that of the first; beyond the last it is extrapolated, but never below the last.
        """
        left, right, part = _between(self._columns, column)
        below, above, share = self._below, self._above, self._share
        low = below[left] + part * _rise(below[left], below[right], part)
        high = above[left] + part * _rise(above[left], above[right], part)
        return low + share * _rise(low, high, share)


def _between(places: Sequence[float], at: float) -> tuple[int, int, float]:
    """Return the indices of the places on either side, and how far `at` is between them: above 1 beyond the last."""
    if at <= places[0] or len(places) == 1:
        return 0, 0, 0.0
    right = bisect_left(places, at, 1, len(places) - 1)
    return right - 1, right, (at - places[right - 1]) / (places[right] - places[right - 1])


def _rise(start: float, end: float, share: float) -> float:
    return end - start if share <= 1 else max(0.0, end - start) + min(0.0, end - start) / share


NUM_FACTORS: Final = 1024  # that a spread is cut into
MOST_SPREADS: Final = 64  # whose factors are kept


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of how much a time varies, as multiples of the time that a profile has; both lists ascend.

    A share shares[i] of all times has a factor below factors[i].
    """

    shares: tuple[float, ...] = (0.5,)
    factors: tuple[float, ...] = (1.0,)

    def at(self, share: float) -> float:
        """Return the factor below which this share of all factors lies.

        It is interpolated linearly between the quantiles and constant beyond the outer ones.
        """
        right = bisect_right(self.shares, share)
        if right in (0, len(self.shares)):
            return self.factors[max(0, right - 1)]
        left = right - 1
        part = (share - self.shares[left]) / (self.shares[right] - self.shares[left])
        return self.factors[left] + part * (self.factors[right] - self.factors[left])

    @property
    def mean(self) -> float:
        """Return the mean of all factors."""
        return fmean(equal_shares(self))


NO_SPREAD: Final = Spread()


@lru_cache(MOST_SPREADS)
def equal_shares(spread: Spread) -> tuple[float, ...]:
    """Return NUM_FACTORS equally likely factors, or a single one if all factors are equal."""
    if len(set(spread.factors)) == 1:
        return spread.factors[:1]
    return tuple(spread.at((index + 0.5) / NUM_FACTORS) for index in range(NUM_FACTORS))


FORMAT: Final = 1
MOST_PLACES: Final = 1000  # of a grid, in either direction
MEASURED: Final = "measured"  # the hardware of a profile that does not say on what it was measured


@dataclass(frozen=True, slots=True)
class TierProfile:
    """The blocks that a node's KV offload holds in host memory and in a file, and the seconds to load one back.

    `splitserve doctor` measures none of it.
    """

    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    host_block_s: float = 0.0
    disk_block_s: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of both."""
        return self.num_host_blocks + self.num_disk_blocks


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """What a node holds and takes."""

    num_blocks: int
    block_size: int  # tokens
    block_bytes: int  # over all layers and ranks
    num_layers: int
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_queued: int
    overlap_min_tokens: int
    tier: TierProfile = TierProfile()

    @property
    def max_sequences(self) -> int:
        """Return how many requests can run at a time: each needs a token of a step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def layout(self) -> KVLayout:
        """Return a KV layout with the right blocks and layers, which is all that a simulation knows of KV."""
        return KVLayout.uniform(self.num_layers, 1, 1, self.block_size, "int8")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds of steps of a node beside a busy one: `answers` are decode steps, `prompts` chunks of prompts.

    Decode steps are by number of requests and mean context, chunks by their tokens and the context before them. While
    no other node of the machine is at work, they take so many times as long as the two alone factors say, at most 1.

    The time of a step with both follows from the two grids; beside prompts, the attention of decoding requests costs
    attention_beside_factor times as much. overhead_s is what a node takes for a step beyond its engine, and
    prompt_overhead_s what it takes beyond that for a step with prompts after it was idle. Times vary by the two spreads
    around all of that, those of steps with prompts by that of prompts.
    """

    answers: Grid
    prompts: Grid
    overhead_s: float
    prompt_overhead_s: float = 0.0
    answers_alone_factor: float = 1.0
    prompts_alone_factor: float = 1.0
    attention_beside_factor: float = 1.0
    answers_spread: Spread = NO_SPREAD
    prompts_spread: Spread = NO_SPREAD

    @property
    def knows_neighbours(self) -> bool:
        """Return whether steps depend on the load of other nodes of the machine."""
        return (self.answers_alone_factor, self.prompts_alone_factor) != (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class TransferProfile:
    """The time of a KV transfer: latency_s, and its bytes at bytes_per_s, after those that the sender sent before."""

    latency_s: float
    bytes_per_s: float

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds of so many bytes, while the sender sends no others."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class ControlProfile:
    """Seconds of a message between coordinator and node, and of the way from client to coordinator and back together.

    `spread` says how much both vary.
    """

    message_s: float
    api_server_s: float
    spread: Spread = NO_SPREAD


@dataclass(frozen=True, slots=True)
class Profile:
    """What one model's nodes on one machine hold and cost."""

    model: str
    cores: int  # of a node
    node: NodeSizes
    steps: StepProfile
    kv_transfer: TransferProfile
    control: ControlProfile
    flags: Mapping[str, str | int | bool] = field(  # of `splitserve up`, for such nodes
        default_factory=dict, hash=False
    )
    hardware: str = MEASURED  # of each device of a node
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def save(self, path: Path) -> None:
        """Write the profile to a file that `read_profile` reads. Raises SettingsError when it cannot be written."""
        save_json({"format": FORMAT, **dataclasses.asdict(self)}, path)


def read_profile(path: Path) -> Profile:
    """Return the profile in a file of `splitserve doctor --save`.

    Raises SettingsError, which names the wrong field, for any other file.
    """
    try:
        fields = read_json_object(path)
        if (found := fields.integer("format")) != FORMAT:
            raise fields.error("format", f"{FORMAT}, as of this version's `splitserve doctor --save`: {found} is not")
        kv_transfer, control = _nested(fields, "kv_transfer"), _nested(fields, "control")
        return Profile(
            model=fields.text("model"),
            cores=fields.integer("cores"),
            node=_sizes(_nested(fields, "node")),
            steps=_steps(_nested(fields, "steps")),
            kv_transfer=TransferProfile(kv_transfer.number("latency_s"), kv_transfer.positive("bytes_per_s")),
            control=ControlProfile(
                control.number("message_s"), control.number("api_server_s"), _spread(control.nested("spread"))
            ),
            flags=_flags(fields.nested("flags")),
            hardware=fields.text("hardware", MEASURED),
            tensor_parallel_size=fields.integer("tensor_parallel_size", 1),
            pipeline_parallel_size=fields.integer("pipeline_parallel_size", 1),
        )
    except ModelError as error:
        raise SettingsError(f"--profile: {error}") from error


def _flags(fields: JsonFields | None) -> dict[str, str | int | bool]:
    flags = {} if fields is None else {name: fields.raw(name) for name in fields.names}
    for name, value in flags.items():
        if not isinstance(value, str | int | bool):
            raise ModelError(f"{name} of flags must be a text, a whole number, true or false")
    return flags


def _steps(fields: JsonFields) -> StepProfile:
    return StepProfile(
        answers=_grid(_nested(fields, "answers")),
        prompts=_grid(_nested(fields, "prompts")),
        overhead_s=fields.number("overhead_s"),
        prompt_overhead_s=fields.number("prompt_overhead_s", 0.0),
        answers_alone_factor=_alone_factor(fields, "answers_alone_factor"),
        prompts_alone_factor=_alone_factor(fields, "prompts_alone_factor"),
        attention_beside_factor=fields.positive("attention_beside_factor", 1.0),
        answers_spread=_spread(fields.nested("answers_spread")),
        prompts_spread=_spread(fields.nested("prompts_spread")),
    )


def _alone_factor(fields: JsonFields, name: str) -> float:
    factor = fields.positive(name, 1.0)
    if factor > 1:
        raise fields.error(name, f"at most 1, as a node is no slower alone: {factor:g} is not")
    return factor


def _sizes(fields: JsonFields) -> NodeSizes:
    may_be_0 = ("overlap_min_tokens",)
    names = [each.name for each in dataclasses.fields(NodeSizes) if each.type is int]
    numbers = {name: fields.integer(name, minimum=0 if name in may_be_0 else 1) for name in names}
    return NodeSizes(**numbers, tier=_tier(fields.nested("tier")))


def _tier(fields: JsonFields | None) -> TierProfile:
    if fields is None:
        return TierProfile()
    return TierProfile(
        fields.integer("num_host_blocks", 0, minimum=0),
        fields.integer("num_disk_blocks", 0, minimum=0),
        fields.number("host_block_s", 0.0),
        fields.number("disk_block_s", 0.0),
    )


def _grid(fields: JsonFields) -> Grid:
    rows, columns = (_places(fields, name) for name in ("rows", "columns"))
    seconds = fields.raw("seconds")
    if not isinstance(seconds, list) or len(seconds) != len(rows):
        raise fields.error("seconds", f"{len(rows)} lists, one for each row")
    return Grid(rows, columns, tuple(_numbers(fields, "seconds", row, len(columns)) for row in seconds))


def _spread(fields: JsonFields | None) -> Spread:
    if fields is None:
        return NO_SPREAD
    shares = _places(fields, "shares")
    if shares[-1] > 1:
        raise fields.error("shares", "ascending numbers from 0 to 1")
    factors = _numbers(fields, "factors", fields.raw("factors"), len(shares))
    if factors[-1] <= 0 or list(factors) != sorted(factors):
        raise fields.error("factors", "numbers of which none is below the one before it, and the last is above 0")
    return Spread(shares, factors)


def _places(fields: JsonFields, name: str) -> tuple[float, ...]:
    given = fields.raw(name)
    places = _numbers(fields, name, given, len(given) if isinstance(given, list) else 0)
    if not 0 < len(places) <= MOST_PLACES or list(places) != sorted(set(places)):
        raise fields.error(name, f"1 to {MOST_PLACES} ascending numbers")
    return places


def _numbers(fields: JsonFields, name: str, values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise fields.error(name, f"a list of {count} numbers" if count else "a list of numbers")
    wrapped = JsonFields({str(index): value for index, value in enumerate(values)}, f"{name}")
    return tuple(wrapped.number(str(index)) for index in range(count))


def _nested(fields: JsonFields, name: str) -> JsonFields:
    if (found := fields.nested(name)) is None:
        raise fields.error(name, "an object")
    return found
