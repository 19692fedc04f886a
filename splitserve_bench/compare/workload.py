"""The load of one probe: the same data set at any rate, and other requests for every seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from serving_core.model_config import read_model_config
from splitserve.launch.models import LocalModel
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import Shape, fit, longer_share, plan, random_load
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.serve.serve_options import AZURE, MOONCAKE, RANDOM, TEXTS, TRACES
from splitserve_bench.serve.target import ServedModel
from splitserve_bench.serve.texts import Texts
from splitserve_bench.serve.traces import TracedRequest, at_rate, read_azure_trace, read_mooncake_trace, trace_load

MOST_TRACED: Final = 100_000  # requests that are read of a trace

SAMPLE: Final = 200  # drawn requests from which a share is told


@dataclass(frozen=True, slots=True)
class Dataset:
    """What the requests are, named as the flags are. Of a trace, a seed chooses the stretch that is replayed, of
    texts the order, so that probes may share some."""

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


class Workload:
    """Plans loads for one model."""

    def __init__(self, dataset: Dataset, model: ServedModel, folder: Path | None = None) -> None:
        """The model's folder has the tokenizer, for texts. Raises BenchError when the data set cannot be read, or the
        server did not tell its vocabulary; ModelError for a folder without a tokenizer."""
        if model.vocab_size is None:
            raise BenchError("without the size of the vocabulary no prompts can be drawn")
        self._dataset = dataset
        self._vocab_size: int = model.vocab_size
        self._max_model_len = model.max_model_len
        self._traced = _traced(dataset)
        self._texts = _texts(dataset, folder)

    def load(self, rate: float, num_requests: int, seed: int) -> list[PlannedRequest]:
        """So many requests at that mean rate per second, or all of a file that has fewer."""
        if self._traced:
            stretch = at_rate(self._stretch(num_requests, seed), rate)
            shapes, send_at_s = trace_load(stretch, self._vocab_size, seed), [each.at_s for each in stretch]
        else:
            shapes = self._drawn(num_requests, Random(f"{seed} shapes"))
            send_at_s = send_times_s(len(shapes), rate, self._dataset.burstiness, Random(f"{seed} arrivals"))
        if self._max_model_len is not None:
            shapes = list(fit(shapes, self._max_model_len).shapes)
        return plan(shapes, send_at_s)

    def clipped_share(self) -> float:
        """The share of the data set's requests that are longer than all can take, and so clipped in every load."""
        lengths = [each.input_tokens + each.output_tokens for each in self._traced]
        if not lengths:
            lengths = [len(each.prompt) + each.output_tokens for each in self._drawn(SAMPLE, Random(0))]
        return 0.0 if self._max_model_len is None else longer_share(lengths, self._max_model_len)

    def _drawn(self, num_requests: int, rng: Random) -> list[Shape]:
        if self._texts is not None:
            return self._texts.shapes(num_requests, rng)
        data = self._dataset
        return random_load(
            num_requests,
            data.random_input_len,
            data.random_output_len,
            data.random_range_ratio,
            self._vocab_size,
            rng,
            prefix_tokens=data.random_prefix_len,
        )

    def _stretch(self, num_requests: int, seed: int) -> Sequence[TracedRequest]:
        start = Random(f"{seed} stretch").randrange(max(1, len(self._traced) - num_requests + 1))
        return self._traced[start : start + num_requests]


def served_by_all(model: LocalModel, max_model_len: int | None, peers: Sequence[ServedModel]) -> ServedModel:
    """The model with the longest requests that our clusters and all peers take."""
    config = read_model_config(model.folder)
    lengths = [config.max_position_embeddings, max_model_len, *(peer.max_model_len for peer in peers)]
    return ServedModel(model.name, min(length for length in lengths if length is not None), config.vocab_size)


def seed_of(base: int, rate: float, number: int) -> int:
    """The seed of a probe: the same for all contenders, another one for every rate and repetition, so that a server
    that keeps KV between probes never sees a prompt again."""
    digest = hashlib.blake2s(f"{base} {rate!r} {number}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def _texts(dataset: Dataset, folder: Path | None) -> Texts | None:
    if dataset.name not in TEXTS:
        return None
    assert folder is not None, "texts need a tokenizer"
    return Texts(
        dataset.name,
        Path(dataset.path),
        folder,
        dataset.text_output_len,
        skips_chat_template=dataset.skip_chat_template,
    )


def _traced(dataset: Dataset) -> list[TracedRequest]:
    if dataset.name not in TRACES:
        return []
    read = {AZURE: read_azure_trace, MOONCAKE: read_mooncake_trace}[dataset.name]
    return read(Path(dataset.path), length_scale=dataset.length_scale, limit=MOST_TRACED)
