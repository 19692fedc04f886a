"""Make the load that the flags of a command describe: random requests, those of a trace, or texts.

Texts are read as vLLM's `bench serve` reads them: ShareGPT's conversations, and prompts one a line. ShareGPT's prompts
are sent as they stand. The model's tokenizer finds their lengths here, with the special tokens that it adds by itself,
as the server's does there. The prompts of a custom file are put into the model's chat template, unless the flags say
otherwise: the token ids are sent that a conversation of this one message has.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from coordinator.text.chat_template import USUAL
from coordinator.text.rendering import DEFAULT, Renderer
from coordinator.text.tokenizer import template_sources
from serving_core.model_files.tokenizer_files import TokenizerFiles, read_tokenizer_files
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import Stage, send_times_s, stage_times_s, stages_of
from splitserve_bench.serve.command import (
    AZURE,
    CAPACITY_REQUESTS,
    NUM_PROMPTS,
    SESSIONS,
    SHAREGPT,
    TEXTS,
    TRACES,
    Dataset,
    ServeOptions,
)
from splitserve_bench.serve.datasets import (
    Shape,
    TracedRequest,
    at_rate,
    fit,
    json_rows,
    ordinary_ids,
    parsed,
    plan,
    random_load,
    read_azure_trace,
    read_mooncake_trace,
    token_count,
    trace_load,
)
from splitserve_bench.serve.drawn import parse_drawn
from splitserve_bench.serve.metrics import Limits, summarize
from splitserve_bench.serve.records import Outcome, PlannedRequest, ServedModel
from splitserve_bench.serve.sessions import SessionShape, drawn_sessions, fit_sessions, planned_sessions, read_sessions

CAPACITY_SEED: Final = 1_000_003  # beside --seed, so that no prompt of the load has been sent before
UNKNOWN_VOCAB_SIZE: Final = 32_000  # few models have a smaller vocabulary
CUSTOM_OUTPUT_TOKENS: Final = 256
# Of ShareGPT's conversations those count whose prompt and reference output have lengths in these bounds.
MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_REQUEST_TOKENS: Final = 2048  # of both together


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that the model can take, how many had to be clipped for that, and the stages that they are sent in."""

    planned: tuple[PlannedRequest, ...]
    num_clipped: int
    stages: tuple[Stage, ...] = ()


class Source:
    """Draw the requests of a data set. `traced` are those of a trace, empty for other data sets."""

    def __init__(
        self, dataset: Dataset, vocab_size: int, tokenizer_folder: Path | None, limit: int | None = None
    ) -> None:
        """Read the data set; of a trace the first `limit` requests, None for all. Texts need the model's folder.

        Raises BenchError when the data set cannot be read, and ModelError for a folder without a tokenizer.
        """
        self._dataset, self._vocab_size = dataset, vocab_size
        self._texts: Texts | None = None
        self.traced: list[TracedRequest] = []
        if dataset.name in TEXTS:
            assert tokenizer_folder is not None, "the flags were not checked"
            self._texts = Texts(dataset, tokenizer_folder)
        elif dataset.name in TRACES:
            read = read_azure_trace if dataset.name == AZURE else read_mooncake_trace
            self.traced = read(Path(dataset.path), length_scale=dataset.length_scale, limit=limit)

    def drawn(self, num_requests: int, rng: Random) -> list[Shape]:
        """Return requests that `rng` draws from a data set that is no trace; fewer where a file has fewer."""
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

    def replayed(self, traced: Sequence[TracedRequest], seed: int, first: int = 0) -> list[Shape]:
        """Return prompts and output lengths of these requests of a trace, in order.

        A prompt depends on the seed, and on the request's hash ids; without these on the seed and the request's number
        in the load. `first` is the number of the first request.
        """
        return trace_load(traced, self._vocab_size, seed, first)

    def clipped_share(self, max_model_len: int, num_sampled: int, rng: Random) -> float:
        """Return the share of requests that have more than `max_model_len` tokens: of all of a trace, else of
        `num_sampled` that `rng` draws."""
        lengths = [each.input_tokens + each.output_tokens for each in self.traced]
        lengths = lengths or [len(each.prompt) + each.output_tokens for each in self.drawn(num_sampled, rng)]
        return sum(length > max_model_len for length in lengths) / len(lengths)


def workload_of(options: ServeOptions, max_model_len: int | None, vocab_size: int) -> Workload:
    """Return the load that the flags describe, clipped to `max_model_len` tokens (None: not clipped).

    With stages --request-rate must be finite. Raises SettingsError or BenchError for a load that cannot be sent.
    """
    if options.stages is not None:
        stages = stages_of(options.stages, options.request_rate)
        times_s = stage_times_s(stages, options.burstiness, options.seed)
        return replace(_of_any_length(options, times_s, max_model_len, vocab_size), stages=stages)
    dataset = options.dataset
    if dataset.name == SESSIONS:
        return _sessions(options, max_model_len, vocab_size)
    if options.takes_chats:  # the server renders them
        dataset = replace(dataset, skip_chat_template=True)
    source = Source(dataset, vocab_size, options.tokenizer, options.num_prompts)
    if source.traced:
        rate = options.request_rate
        traced = at_rate(source.traced, rate) if math.isfinite(rate) else source.traced
        shapes, times_s = source.replayed(traced, options.seed), [each.at_s for each in traced]
    else:
        shapes = source.drawn(options.num_prompts or NUM_PROMPTS, Random(options.seed))
        times_s = _times_s(len(shapes), options)
    num_clipped = 0
    if max_model_len is not None:
        fitted = fit(shapes, max_model_len)
        shapes, num_clipped = list(fitted.shapes), fitted.num_clipped
    return Workload(tuple(plan(shapes, times_s, ignore_eos=options.ignore_eos)), num_clipped)


def _sessions(options: ServeOptions, max_model_len: int | None, vocab_size: int) -> Workload:
    """Return the turns of drawn sessions, or of those of a file."""
    data, rng = options.dataset, Random(f"{options.seed} sessions")
    if data.path:
        encode = None
        if options.tokenizer is not None:
            tokenizer = read_tokenizer_files(options.tokenizer).tokenizer

            def encode(text: str) -> list[int]:
                return list(tokenizer.encode(text, add_special_tokens=False).ids)

        sessions = read_sessions(Path(data.path), data.random_output_len, vocab_size, options.seed, encode)
        sessions = sessions[: options.num_prompts]
    else:
        spread = data.random_range_ratio
        lengths = [
            parse_drawn(f"{mean * (1 - spread):.9f}-{mean * (1 + spread):.9f}")
            for mean in (data.random_input_len, data.random_output_len)
        ]
        shape = SessionShape(
            parse_drawn(data.num_turns),
            lengths[0],
            parse_drawn(data.turn_input_len),
            lengths[1],
            parse_drawn(data.think_time_s),
            data.random_prefix_len,
            data.num_agents,
            data.agent_prefix_len,
        )
        sessions = drawn_sessions(options.num_prompts or NUM_PROMPTS, shape, vocab_size, rng)
    num_clipped = 0
    if max_model_len is not None:
        sessions, num_clipped = fit_sessions(sessions, max_model_len, is_chat=options.takes_chats)
    times_s = _times_s(len(sessions), options)
    planned = planned_sessions(sessions, times_s, num_users=data.num_users, ignore_eos=options.ignore_eos)
    if not options.takes_chats:  # the next turn continues token ids
        planned = [replace(each, text="") for each in planned]
    return Workload(tuple(planned), num_clipped)


def capacity_load(options: ServeOptions, max_model_len: int | None, vocab_size: int) -> Workload:
    """Return the requests that measure a server's capacity, all due at once: those of the data set, by another seed.

    Raises SettingsError or BenchError for a load that cannot be sent.
    """
    options = replace(options, seed=options.seed + CAPACITY_SEED)
    return _of_any_length(options, [0.0] * CAPACITY_REQUESTS, max_model_len, vocab_size)


def capacity_per_s(outcomes: Sequence[Outcome]) -> float:
    """Return how many requests of a closed loop ended a second. Raises BenchError when some failed."""
    summary = summarize(outcomes, Limits())
    if summary.num_failed:
        raise BenchError(
            f"the capacity cannot be measured: {summary.num_failed} of {len(outcomes)} requests failed "
            f"({summary.frequent_errors[0][0]}); give --request-rate"
        )
    return len(outcomes) / (summary.duration_s - min(each.sent_s for each in outcomes))


def warm_up_of(workload: Workload, count: int, vocab_size: int, seed: int) -> list[PlannedRequest]:
    """Return `count` requests with the lengths of the load's first ones and other prompts, all due at once.

    The prompts are drawn by `seed` from a vocabulary of `vocab_size` tokens.
    """
    ids = ordinary_ids(vocab_size)
    requests = []
    for index in range(count if workload.planned else 0):
        like = workload.planned[index % len(workload.planned)]
        prompt = tuple(Random(f"{seed} warm-up {index}").choices(ids, k=len(like.prompt)))
        alone = replace(like, session=None, turn=0, after=(), gap_s=0.0, continues=None)
        requests.append(replace(alone, index=index, send_at_s=0.0, prompt=prompt, text=""))
    return requests


def as_texts(planned: Sequence[PlannedRequest], folder: Path) -> list[PlannedRequest]:
    """Return the requests with their prompts as text, which the folder's tokenizer makes of the token ids.

    Raises ModelError for a folder without a tokenizer.
    """
    tokenizer = read_tokenizer_files(folder).tokenizer
    return [each if each.text else replace(each, text=tokenizer.decode(each.prompt)) for each in planned]


def vocab_size_of(options: ServeOptions, served: ServedModel, report: Callable[[str], None]) -> int:
    """Return the vocabulary's size: the flag's, the tokenizer folder's, the server's, or a guess, which is reported.

    Raises ModelError for a folder without a tokenizer.
    """
    if options.vocab_size is not None:
        return options.vocab_size
    if options.tokenizer is not None:
        return int(read_tokenizer_files(options.tokenizer).tokenizer.get_vocab_size())
    if served.vocab_size is not None:
        return served.vocab_size
    report(
        f"the server does not tell its vocabulary: prompts are of token ids below {UNKNOWN_VOCAB_SIZE} (--tokenizer)"
    )
    return UNKNOWN_VOCAB_SIZE


def _of_any_length(
    options: ServeOptions, times_s: Sequence[float], max_model_len: int | None, vocab_size: int
) -> Workload:
    """Return requests at these times. A data set that ends too early begins anew, with other tokens.

    Only prompts of which a trace says that they begin alike keep their tokens.
    """
    planned: list[PlannedRequest] = []
    num_clipped, lap = 0, 0
    while missing := len(times_s) - len(planned):
        part = replace(options, stages=None, request_rate=math.inf, num_prompts=missing, seed=options.seed + lap)
        workload = workload_of(part, max_model_len, vocab_size)
        planned += workload.planned
        num_clipped, lap = num_clipped + workload.num_clipped, lap + 1
    timed = [replace(each, index=i, send_at_s=times_s[i]) for i, each in enumerate(planned)]
    return Workload(tuple(timed), num_clipped)


def _times_s(count: int, options: ServeOptions) -> list[float]:
    return send_times_s(count, options.request_rate, options.burstiness, Random(f"{options.seed} arrivals"))


# ---- texts ----


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt, and the length of its output: that of the reference output where there is one."""

    prompt: str
    reference: str | None
    output_tokens: int


class Texts:
    """Draw the prompts of one file of texts."""

    def __init__(self, dataset: Dataset, tokenizer_folder: Path) -> None:
        """Read the file and the tokenizer.

        Raises BenchError, which names place and value, for an unusable file and a folder without a chat template, and
        ModelError for a folder without a tokenizer.
        """
        self._path, self._is_pruned = Path(dataset.path), dataset.name == SHAREGPT
        files = read_tokenizer_files(tokenizer_folder)
        self._tokenizer = files.tokenizer
        self._chat = None if self._is_pruned or dataset.skip_chat_template else _chat(files, tokenizer_folder)
        try:
            read = _conversations if self._is_pruned else _lines
            self._texts = list(read(self._path, dataset.text_output_len))
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{self._path} cannot be read: {error}") from error

    def shapes(self, num_requests: int, rng: Random) -> list[Shape]:
        """Return prompts in an order that `rng` draws, none twice; fewer than wanted where there are no more.

        Raises BenchError when there is none.
        """
        shapes: list[Shape] = []
        for text in rng.sample(self._texts, len(self._texts)):
            if len(shapes) == num_requests:
                break
            shape = self._shape(text)
            if not self._is_pruned or _is_kept(shape, is_given=text.reference is None):
                shapes.append(shape)
        if not shapes:
            kept = (
                f", prompts of {MIN_TOKENS} to {MAX_PROMPT_TOKENS} tokens and {MAX_REQUEST_TOKENS} with their outputs"
            )
            raise BenchError(f"{self._path} has no requests{kept if self._is_pruned else ''}")
        return shapes

    def _shape(self, text: _Text) -> Shape:
        if self._chat is not None:
            ids = self._tokenizer.encode(self._chat(text.prompt), add_special_tokens=False).ids  # it wrote them itself
            return Shape(tuple(ids), text.output_tokens)
        output_tokens = text.output_tokens if text.reference is None else len(self._encode(text.reference))
        return Shape(tuple(self._encode(text.prompt)), output_tokens, text.prompt)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def _chat(files: TokenizerFiles, folder: Path) -> Callable[[str], str]:
    """Return a function that renders a conversation of one message as the model reads it."""
    source = template_sources(folder, files.config).get(DEFAULT)
    if source is None:
        raise BenchError(f"{folder} has no chat template: --skip-chat-template sends the prompts as they stand")
    renderer = Renderer(source, "", files.special_tokens, "")

    def rendered(prompt: str) -> str:
        chat = {"messages": [{"role": "user", "content": prompt}], **asdict(USUAL)}
        answer = json.loads(renderer.answer(chat))
        if "text" not in answer:
            raise BenchError(f"the chat template of {folder} does not take a prompt: {next(iter(answer.values()))}")
        return str(answer["text"])

    return rendered


def _is_kept(shape: Shape, *, is_given: bool) -> bool:
    """Return whether a conversation's lengths are in ShareGPT's bounds; an output of given length may be short."""
    prompt_tokens, output_tokens = len(shape.prompt), shape.output_tokens
    is_long_enough = prompt_tokens >= MIN_TOKENS and (is_given or output_tokens >= MIN_TOKENS)
    return is_long_enough and prompt_tokens <= MAX_PROMPT_TOKENS and prompt_tokens + output_tokens <= MAX_REQUEST_TOKENS


def _conversations(path: Path, output_tokens: int | None) -> Iterator[_Text]:
    """Yield the prompt (first turn) and the reference output (second turn) of each conversation that has two turns."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise BenchError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
    except RecursionError as error:
        raise BenchError(f"{path} is nested too deeply") from error
    if not isinstance(entries, list):
        raise BenchError(f"{path} is no JSON list of conversations, as ShareGPT's is")
    for number, entry in enumerate(entries, start=1):
        where = f"{path}, entry {number}"
        turns = parsed(_turns, entry, "conversations", where)
        if len(turns) >= 2:
            prompt, reference = (parsed(_value, turn, "a turn's value", where) for turn in turns[:2])
            yield _Text(prompt, reference if output_tokens is None else None, output_tokens or 0)


def _lines(path: Path, output_tokens: int | None) -> Iterator[_Text]:
    with path.open(encoding="utf-8-sig") as file:
        for where, row in json_rows(file, path):
            prompt, own = parsed(_prompt, row.get("prompt"), "prompt", where), row.get("output_tokens")
            usual = CUSTOM_OUTPUT_TOKENS if own is None else parsed(_positive, own, "output_tokens", where)
            yield _Text(prompt, None, output_tokens or usual)


def _turns(entry: Any) -> list[Any]:
    turns = entry.get("conversations", []) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise TypeError
    return turns


def _value(turn: Any) -> str:
    return _text(turn.get("value") if isinstance(turn, dict) else None)


def _prompt(value: Any) -> str:
    if not (text := _text(value)):
        raise ValueError
    return text


def _text(value: Any) -> str:
    """Return a text. Raises TypeError, and ValueError for half of a surrogate pair, which no server takes."""
    if not isinstance(value, str):
        raise TypeError
    value.encode()
    return value


def _positive(value: Any) -> int:
    if not (count := token_count(value)):
        raise ValueError
    return count
