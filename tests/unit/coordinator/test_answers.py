"""From sampled tokens to what the client reads: chunks, stop strings, the end."""

import asyncio
import contextlib
import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.generation import Generation
from coordinator.control.instructions import Chunk, chunk_of
from coordinator.control.request import SoFar
from coordinator.text.answers import Answer, AnswerText, TextOptions
from coordinator.text.stop_strings import StopMatcher
from coordinator.text.tokenizer import read_tokenizer
from protos import inference_pb2
from serving_core.errors import RequestError
from tests.fleet_events import LENGTH, STOP, sampled
from tests.tiny_models import EOS, write_tokenizer

UNSPECIFIED = inference_pb2.FINISH_REASON_UNSPECIFIED


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return read_tokenizer(folder)


def answer_with(tokenizer, so_far=None, **options):
    """Return an answer, which goes on behind `so_far` if that is given."""
    options = TextOptions(**options)
    text = AnswerText(tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens), options)
    if so_far is not None:
        text.resume(so_far)
    return Answer(Generation("r", 1), 0, text)


def add(answer, tokens):
    return answer.add(chunk_of(tokens, None))


def tokens_of(data, start=0, finish_reason=0):
    tokens = [sampled(None, start + index, token_id) for index, token_id in enumerate(data)]
    tokens[-1].finish_reason = finish_reason
    return tokens


async def drain(generation):
    return [response async for response in responses(generation)]


def unread(generation):
    """Take the messages that wait for their reader."""

    async def take():
        return [await generation.next() for _ in range(generation.num_unsent)]

    return asyncio.run(take())


async def responses(generation):
    while (response := await generation.next()) is not None:
        yield response


def read(answer, finish_reason=LENGTH, completion_tokens=99):
    """Ends the answer; its text, token ids and Complete as the client sees them."""
    answer.end(inference_pb2.Complete(finish_reason=finish_reason, completion_tokens=completion_tokens))
    *chunks, last = asyncio.run(drain(answer.generation))
    token_ids = [token_id for response in chunks for token_id in response.chunk.token_ids]
    assert last.chunk is None
    assert all(response.complete is None for response in chunks)
    return "".join(response.chunk.text for response in chunks), token_ids, last.complete


def test_tokens_of_one_step_become_one_chunk_with_their_logprobs(tokenizer):
    answer = answer_with(tokenizer)
    top = [inference_pb2.TopLogprob(token_id=5, logprob=-2.0)]
    add(answer, [sampled(None, 0, ord("a"), logprob=-0.5, top=top), sampled(None, 1, ord("b"), logprob=-1.0)])
    message = asyncio.run(answer.generation.next())
    assert inference_pb2.GenerateResponse(request_id="r", **message.fields()) == inference_pb2.GenerateResponse(
        request_id="r",
        chunk=inference_pb2.Chunk(
            token_ids=[97, 98],
            text="ab",
            logprobs=[
                inference_pb2.TokenLogprobs(token_id=97, logprob=-0.5, top=top),
                inference_pb2.TokenLogprobs(token_id=98, logprob=-1.0),
            ],
        ),
    )


def test_half_a_character_waits_and_is_flushed_at_the_end(tokenizer):
    answer = answer_with(tokenizer)
    add(answer, tokens_of("é".encode()[:1]))
    chunk = asyncio.run(answer.generation.next()).chunk
    assert (chunk.token_ids, chunk.text) == ([0xC3], "")
    assert read(answer) == ("\ufffd", [], inference_pb2.Complete(finish_reason=LENGTH, completion_tokens=99))


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one <stop>")])
def test_a_stop_string_ends_the_answer_within_a_step_and_counts_to_its_last_token(tokenizer, include, text):
    answer = answer_with(tokenizer, stop=("<stop>",), include_stop_str_in_output=include)
    add(answer, tokens_of(b"one <st"))
    assert answer.matched_stop is None
    add(answer, tokens_of(b"op> two", 7, LENGTH))
    assert answer.matched_stop == "<stop>"
    add(answer, tokens_of(b"three", 14))
    complete = inference_pb2.Complete(
        finish_reason=inference_pb2.FINISH_REASON_STOP, matched_stop_str="<stop>", completion_tokens=10
    )
    assert read(answer) == (text, [*b"one <stop>"], complete)


def test_a_stop_string_does_not_count_before_min_tokens(tokenizer):
    answer = answer_with(tokenizer, stop=("x",), min_tokens=3)
    add(answer, tokens_of(b"xxxx"))
    text, token_ids, complete = read(answer)
    assert (text, token_ids) == ("xx", [*b"xxx"])
    assert complete.completion_tokens == 3


def test_a_stop_string_at_the_end_of_an_answer_that_was_cut_short_is_its_reason(tokenizer):
    answer = answer_with(tokenizer, stop=["\ufffd"])
    add(answer, tokens_of(b"a\xc3"))
    answer.end(inference_pb2.Complete(finish_reason=inference_pb2.FINISH_REASON_ABORT, error="why"))
    complete = asyncio.run(drain(answer.generation))[-1].complete
    assert (complete.finish_reason, complete.matched_stop_str, complete.error) == (STOP, "\ufffd", "")


def test_the_beginning_of_a_stop_string_is_text_when_the_answer_ends(tokenizer):
    answer = answer_with(tokenizer, stop=("<stop>",))
    add(answer, tokens_of(b"a<st"))
    assert read(answer)[0] == "a<st"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_text_of_a_token_that_ends_the_answer_is_like_a_stop_string(tokenizer, include, text):
    answer = answer_with(tokenizer, include_stop_str_in_output=include)
    add(answer, tokens_of(b"abc", finish_reason=STOP))
    assert read(answer, STOP)[:2] == (text, [*b"abc"])


def test_special_tokens_are_text_only_on_demand(tokenizer):
    for skip, text in ((True, "a"), (False, "a<|eos|>")):
        answer = answer_with(tokenizer, skip_special_tokens=skip)
        add(answer, [sampled(None, 0, 97), sampled(None, 1, EOS)])
        assert read(answer)[0] == text


def test_a_lost_token_is_not_passed_over(tokenizer):
    answer = answer_with(tokenizer)
    add(answer, tokens_of(b"ab"))
    with pytest.raises(RequestError, match="token 3 came in place of token 2"):
        add(answer, tokens_of(b"d", 3))


@given(text=st.text("ab<é", max_size=20), stop=st.text("ab<é", min_size=1, max_size=3), data=st.data())
def test_chunks_join_to_the_text_however_tokens_and_reads_fall(tokenizer, text, stop, data):
    answer = answer_with(tokenizer, stop=(stop,))
    encoded, start, chunks = text.encode(), 0, []
    while start < len(encoded):
        end = data.draw(st.integers(start + 1, len(encoded)))
        add(answer, tokens_of(encoded[start:end], start))
        start = end
        if data.draw(st.booleans()):
            chunks += [response.chunk for response in unread(answer.generation)]
    answer.end(inference_pb2.Complete())
    *rest, last = asyncio.run(drain(answer.generation))
    chunks += [response.chunk for response in rest]
    assert "".join(chunk.text for chunk in chunks) == text.partition(stop)[0]
    for chunk, following in itertools.pairwise(chunks):
        assert following.first_token_index == chunk.first_token_index + len(chunk.token_ids)
    assert last.complete.matched_stop_str == (stop if stop in text else "")


@given(
    data=st.binary(min_size=1, max_size=12) | st.text("ab<é", min_size=1, max_size=12).map(str.encode),
    stop=st.sampled_from(["", "b", "ab", "é<"]),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    finish_reason=st.sampled_from([STOP, LENGTH]),
    cut=st.integers(0, 12),
    has_rest=st.booleans(),
)
def test_an_answer_that_goes_on_has_the_text_of_one_that_was_never_broken_off(
    tokenizer, data, stop, include, min_tokens, finish_reason, cut, has_rest
):
    """`has_rest`: the call breaks off between the last of the text and its end."""
    options = {"stop": (stop,) if stop else (), "include_stop_str_in_output": include, "min_tokens": min_tokens}
    unbroken, broken = (answer_with(tokenizer, **options) for _ in range(2))
    tokens = tokens_of(data, finish_reason=finish_reason)
    for answer, part in ((unbroken, tokens), (broken, tokens[:cut])):
        for token in part:
            add(answer, [token])
    expected = read(unbroken, finish_reason)
    if has_rest and cut >= len(data):
        text, token_ids, _ = read(broken)
    else:
        chunks = [response.chunk for response in unread(broken.generation)]
        text = "".join(chunk.text for chunk in chunks)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    reason = finish_reason if len(token_ids) == len(data) else UNSPECIFIED
    so_far = SoFar(tuple(token_ids), len(text), reason) if token_ids else None
    resumed = answer_with(tokenizer, so_far, **options)
    for token in tokens[len(token_ids) :]:
        add(resumed, [token])
    more, more_ids, complete = read(resumed, finish_reason)
    assert (text + more, token_ids + more_ids, complete) == expected


def test_unread_chunks_join_and_a_reader_too_far_behind_is_refused():
    generation = Generation("r", 2, max_unsent_tokens=3)
    generation.push_chunk(0, Chunk(0, [1], "a"))
    generation.push_chunk(0, Chunk(1, [2], "b"))
    generation.push_chunk(1, Chunk(0, [3, 4], "c"))
    generation.push_chunk(0, Chunk(2, [5], "d"))
    first = asyncio.run(generation.next())
    assert (first.index, list(first.chunk.token_ids), first.chunk.text) == (0, [1, 2], "ab")
    generation.push_chunk(0, Chunk(3, [6, 7], "e"))
    with pytest.raises(RequestError, match="7 tokens behind, the limit is 6") as error:
        generation.push_chunk(0, Chunk(5, [8, 9], "f"))
    generation.fail(error.value)
    with pytest.raises(RequestError, match="7 tokens behind"):
        asyncio.run(generation.next())


def test_an_error_comes_after_what_is_queued():
    generation = Generation("r", 1)
    generation.push_chunk(0, Chunk(0, [1], "a"))
    generation.fail(RequestError("WORKER_LOST", "gone"))
    generation.fail(RequestError("DRAINING", "later"))
    assert asyncio.run(generation.next()).chunk.text == "a"
    with pytest.raises(RequestError, match="gone"):
        asyncio.run(generation.next())


def chunk(first_index, text):
    return Chunk(first_index, [*map(ord, text)], text)


async def read_ready(generation):
    """What goes out without waiting for more."""
    read = []
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0):
                read.append(await generation.next())
    told = [(each.index, each.chunk or Chunk(0, [])) for each in read if each is not None]
    return [(index, chunk.first_token_index, chunk.text) for index, chunk in told]


async def test_a_reader_that_waits_can_send_chunks_at_once_and_those_it_does_not_are_queued():
    generation, sent = Generation("r", 1, max_unsent_tokens=2), list[str]()

    def deliver(index, chunk):
        assert index == 0
        if chunk.text == "?":
            return False
        sent.append(chunk.text)
        return True

    generation.push_chunk(0, chunk(0, "a"))  # nobody waits yet
    assert (await generation.next(deliver)).chunk.text == "a"
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(generation.next(deliver))
        await asyncio.sleep(0)
        for index, text in enumerate("bcd?f", start=1):  # more than may be unsent
            generation.push_chunk(0, chunk(index, text))
    assert (sent, reading.result().chunk.text) == (["b", "c", "d"], "?f")  # in order
    generation.push_chunk(0, chunk(6, "gh"))
    with pytest.raises(RequestError, match="3 tokens behind"):
        generation.push_chunk(0, chunk(8, "i"))
    assert sent == ["b", "c", "d"]


async def test_a_failure_to_send_at_once_is_the_readers():
    generation = Generation("r", 1)
    reading = asyncio.create_task(generation.next(lambda index, chunk: [][index]))
    await asyncio.sleep(0)
    generation.push_chunk(0, chunk(0, "a"))
    with pytest.raises(IndexError):
        await reading


async def test_tokens_are_held_until_there_are_enough_of_them():
    generation = Generation("r", 1, stream_interval=3)
    generation.push_chunk(0, chunk(0, "a"))
    assert await read_ready(generation) == [(0, 0, "a")]  # the first never waits
    generation.push_chunk(0, chunk(1, "b"))
    generation.push_chunk(0, chunk(2, "c"))
    assert await read_ready(generation) == []
    generation.push_chunk(0, chunk(3, "d"))
    assert await read_ready(generation) == [(0, 1, "bcd")]


async def test_the_end_does_not_wait_for_more_tokens():
    generation = Generation("r", 2, stream_interval=5)
    for index in (0, 1):
        generation.push_chunk(index, chunk(0, "a"))
        generation.push_chunk(index, chunk(1, "b"))
    await read_ready(generation)
    generation.push_chunk(0, chunk(2, "c"))
    generation.push_complete(0, inference_pb2.Complete(completion_tokens=3))
    assert await read_ready(generation) == [(0, 1, "bc"), (0, 0, "")]
    generation.fail(RequestError("WORKER_LOST", "gone"))
    assert (await generation.next()).chunk.text == "b"
    with pytest.raises(RequestError, match="gone"):
        await generation.next()


# ---- stop strings, against an oracle that searches the whole text ----

LETTERS = st.text("ab", min_size=1, max_size=4)


def oracle(text: str, stops: list[str], may_stop_from: int = 0) -> tuple[str, str | None]:
    """The text before the stop string that ends first, the longest of those that end together."""
    for end in range(may_stop_from, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return text[: end - len(match)], match
    return text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return out
    return out + matcher.flush()


@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(st.text("abc", max_size=5), max_size=8))
def test_any_split_of_a_text_gives_what_the_whole_text_gives(stops, pieces):
    matcher = StopMatcher(stops)
    text, match = oracle("".join(pieces), stops)
    assert feed_all(matcher, pieces) == text
    assert matcher.matched == match


@given(st.lists(LETTERS, min_size=1, max_size=4), st.text("abc", max_size=20))
def test_exactly_the_longest_tail_that_begins_a_stop_string_is_held_back(stops, text):
    matcher = StopMatcher(stops)
    out = ""
    for end, char in enumerate(text, 1):
        out += matcher.feed(char)
        if matcher.matched is not None:
            return
        begins = [text[start:end] for start in range(end + 1) if any(s.startswith(text[start:end]) for s in stops)]
        assert out + max(begins, key=len) == text[:end]


@given(st.lists(LETTERS, min_size=1, max_size=3), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_stop_strings_that_end_too_early_do_not_count(stops, early, late):
    matcher = StopMatcher(stops)
    out = matcher.feed(early, may_stop=False) + feed_all(matcher, [late])
    text, match = oracle(early + late, stops, may_stop_from=len(early) + 1)
    assert (out, matcher.matched) == (text, match)


def test_a_match_across_pieces_takes_back_nothing_that_was_sent():
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("a<e") == "a"
    assert matcher.feed("n") == ""
    assert matcher.feed("x") == "<enx"
    assert matcher.feed("<end>more") == ""
    assert matcher.matched == "<end>"


def test_answers_with_the_same_stop_strings_share_what_is_built_of_them_and_nothing_else():
    many = [f"{number:04}" * 20 for number in range(100)]
    tracemalloc.start()
    try:
        first, num_bytes = StopMatcher(many), tracemalloc.get_traced_memory()[0]
        second, num_bytes_of_both = StopMatcher(many), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes_of_both < 1.01 * num_bytes
    assert (first.feed("0000"), second.feed("0000")) == ("", "")
    one, other = StopMatcher(["ab", "b"]), StopMatcher(["ab", "b"])
    assert one.feed("xa") == "x"
    assert other.feed("b") == ""
    assert (one.matched, other.matched) == (None, "b")


def test_many_long_stop_strings_over_a_long_text():
    stops = [("ab" * 128)[:-1] + char for char in "cdefghijklmnopqr"]
    matcher = StopMatcher(stops)
    text = "ab" * 50_000
    assert feed_all(matcher, [text]) == text
