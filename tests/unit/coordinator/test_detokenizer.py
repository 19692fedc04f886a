"""Incremental text against tokenizers' own decoding of all tokens at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordinator.api.http.logprobs import TextOffsets, echo_of
from coordinator.text.answers import AnswerText, TextOptions
from coordinator.text.detokenizer import DetokenizerFactory
from protos.inference_pb2 import FINISH_REASON_UNSPECIFIED
from serving_core.errors import ModelError
from tests import fleet_events as events
from tests import scripted_nodes
from tests.effort import few
from tests.scripted_nodes import begin, run
from tests.tiny_models import write_fake_model
from tests.unit.coordinator.http_kit import http_cluster, post

pytestmark = pytest.mark.usefixtures("programs_here")

ADDED = [AddedToken("<|end|>", special=True), AddedToken("<tool é>", special=False)]


def byte_level() -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Llama 2's kind: words with a space mark, and byte tokens for what has no word."""
    pieces = ["<unk>", "▁hello", "▁", "world", "▁▁", "é", "�", ".", "▁<0x", "x"]
    pieces += [f"<0x{byte:02X}>" for byte in (*"A😀é".encode(), 0xFF, 0xBF)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(ADDED)
    tokenizer.add_special_tokens(ADDED[:1])
    return tokenizer


GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
LLAMA = [*GEMMA, decoders.Strip(" ", 1, 0)]


def wordpiece() -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(["[UNK]", "hello", "##ing", "world", ".", ",", "don", "'t"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return with_added(tokenizer)


TOKENIZERS = {
    "byte level": byte_level(),
    "llama": sentencepiece(decoders.Sequence(LLAMA)),
    "gemma": sentencepiece(decoders.Sequence(GEMMA)),
    "metaspace": sentencepiece(decoders.Metaspace()),
    "wordpiece": wordpiece(),
}


PIECES = ("▁hello", "▁", "world", "▁▁", ".", "x")
WORDS = {"byte level": ("a", "Ġ", "x"), "llama": PIECES, "gemma": PIECES, "metaspace": PIECES}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special_tokens", few([True, False]))
@given(data=st.data())
def test_the_pieces_are_together_what_the_tokenizer_decodes(name, skip_special_tokens, data):
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=24))
    detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=skip_special_tokens)
    text = "".join(detokenizer.add(token_id) for token_id in token_ids) + detokenizer.flush()
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma", "metaspace"])
@given(data=st.data())
def test_a_text_that_goes_on_with_another_one_keeps_the_blank_between(name, data):
    tokenizer = TOKENIZERS[name]
    words = st.lists(st.sampled_from([tokenizer.token_to_id(each) for each in WORDS[name]]), min_size=1, max_size=6)
    prompt, answer, end = data.draw(words), data.draw(words), tokenizer.token_to_id("<|end|>")
    for after in (prompt, [*prompt, end], [*prompt, tokenizer.get_vocab_size() + 2]):
        detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=True, after=after)
        text = "".join(map(detokenizer.add, answer)) + detokenizer.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *answer])


def test_a_text_behind_half_a_character_or_nothing_but_special_tokens_begins_anew():
    tokenizer = TOKENIZERS["llama"]
    for token in ("<0xF0>", "<|end|>"):
        detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=True, after=[tokenizer.token_to_id(token)])
        assert detokenizer.add(tokenizer.token_to_id("▁hello")) == "hello"


def test_tags_that_are_special_tokens_may_be_kept():
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>"])
    factory = DetokenizerFactory(tokenizer)
    factory.keep(["<think>", "no token"])
    detokenizer = factory(skip_special_tokens=True)
    assert [detokenizer.add(tokenizer.token_to_id(token)) for token in ("<think>", "<|end|>")] == ["<think>", ""]


@given(st.text(st.sampled_from("aé😀�日本 \n"), max_size=12))
def test_no_piece_ends_within_a_character(text):
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=True)
    sent = ""
    for end, token_id in enumerate(tokenizer.encode(text).ids, 1):  # one token for each byte
        sent += detokenizer.add(token_id)
        assert sent == text.encode()[:end].decode("utf-8", "ignore")
    assert detokenizer.flush() == ""


def test_a_genuine_replacement_character_does_not_wait():
    tokenizer = TOKENIZERS["llama"]
    detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=True)
    assert detokenizer.add(tokenizer.token_to_id("�")) == "�"


def test_why_the_stream_of_the_library_is_not_enough():
    """When `DecodeStream` passes this, it can take the place of coordinator/text/detokenizer.py: today it has told what
    it takes back, and never tells a replacement character at the end."""
    tokenizer = TOKENIZERS["llama"]
    tokens = ids_of(tokenizer, "▁hello", "<0xC3>", "<0xA9>", "<0xFF>", "x")
    stream = decoders.DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(tokenizer, token_id) for token_id in tokens]
    detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=True)
    assert "".join(map(detokenizer.add, tokens)) == tokenizer.decode(tokens)
    [replacement] = ids_of(tokenizer, "�")
    assert decoders.DecodeStream().step(tokenizer, replacement) is None
    assert tokenizer.decode([replacement]) == "�"


def test_an_answer_keeps_the_space_before_its_later_words():
    tokenizer = TOKENIZERS["llama"]
    detokenizer = DetokenizerFactory(tokenizer)(skip_special_tokens=True)
    hello, end = tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("<|end|>")
    assert [detokenizer.add(token_id) for token_id in (end, hello, end, hello)] == ["", "hello", "", " hello"]


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.Strip(" ", 0, 1)])
def test_a_decoder_that_cannot_be_followed_is_refused(decoder):
    with pytest.raises(ModelError, match=r"decoder .* is not supported"):
        DetokenizerFactory(sentencepiece(decoder))


# ---- tokens of bytes: where they are in the text, and stop strings that end within them ----

SPELLED = {"byte level": "a😀é x", "llama": "A😀é", "gemma": "A😀é"}


def ids_of(tokenizer, *tokens):
    return [tokenizer.token_to_id(token) for token in tokens]


def units_of(name):
    """Runs of tokens that are whole characters each: those of a word, or the bytes of a character."""
    tokenizer = TOKENIZERS[name]
    if name == "byte level":
        return [tokenizer.encode(char).ids for char in SPELLED[name]]
    spelled = [ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in char.encode())) for char in SPELLED[name]]
    return spelled + [ids_of(tokenizer, word) for word in ("▁hello", "world", ".", "é")]


@pytest.mark.parametrize("name", SPELLED)
@given(data=st.data())
def test_a_token_begins_behind_the_characters_before_it(name, data):
    tokenizer = TOKENIZERS[name]
    units = data.draw(st.lists(st.sampled_from(units_of(name)), max_size=8))
    token_ids = [token_id for unit in units for token_id in unit]
    starts = [at for at in range(len(units)) for _ in units[at]]
    expected = [len(tokenizer.decode([each for unit in units[:start] for each in unit])) for start in starts]
    sizes, left = [], len(token_ids)
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    offsets, found = TextOffsets(DetokenizerFactory(tokenizer)(skip_special_tokens=True)), []
    for size in sizes:  # as they come in chunks
        found += offsets.add(token_ids[len(found) : len(found) + size])
    assert found == expected
    echo = echo_of(token_ids, DetokenizerFactory(tokenizer)(skip_special_tokens=True), None)
    assert (echo.text, list(echo.offsets)) == (tokenizer.decode(token_ids), expected)


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("llama", ["<0xF0>", "<0x9F>", "x", "x"], [0, 0, 2, 3]),  # a U+FFFD for each byte
        ("llama", ["<0xFF>", "<0xBF>", "<0xFF>", "x"], [0, 1, 2, 3]),
        ("llama", ["x", "<0xC3>", "<|end|>", "<0xA9>", "x"], [0, 1, 1, 1, 2]),
        ("byte level", ["ð", "a", "a"], [0, 1, 2]),
        ("byte level", ["ð", "ð", "a"], [0, 1, 2]),
    ],
)
def test_bytes_that_are_no_text_have_their_places_too(name, tokens, expected):
    tokenizer = TOKENIZERS[name]
    token_ids = ids_of(tokenizer, *tokens)
    assert len(tokenizer.decode(token_ids)) == expected[-1] + 1
    offsets = TextOffsets(DetokenizerFactory(tokenizer)(skip_special_tokens=True))
    assert offsets.add(token_ids) == expected


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize("includes_stop", few([False, True]))
@given(data=st.data())
def test_an_answer_ends_at_the_token_that_completes_a_stop_string(name, includes_stop, data):
    tokenizer = TOKENIZERS[name]
    units = data.draw(st.lists(st.sampled_from(units_of(name)), max_size=10))
    token_ids = [token_id for unit in units for token_id in unit]
    stop = data.draw(st.sampled_from(["é", "😀", "éé", "A😀", "lo😀", "é."]))
    options = TextOptions(stop=(stop,), include_stop_str_in_output=includes_stop)
    text, written, num_tokens = AnswerText(DetokenizerFactory(tokenizer)(skip_special_tokens=True), options), "", 0
    while num_tokens < len(token_ids) and text.matched_stop is None:
        written += text.add(token_ids[num_tokens], FINISH_REASON_UNSPECIFIED)
        num_tokens += 1
    written += text.rest()
    known = [tokenizer.decode(token_ids[:num]) for num in range(len(token_ids) + 1)]
    expected = next((num for num, each in enumerate(known) if stop in each), len(token_ids))
    before, found, _ = known[expected].partition(stop)
    assert (num_tokens, text.num_tokens, text.matched_stop) == (expected, expected, stop if found else None)
    assert written == (before + found if includes_stop else before)


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 2), (2, 2), (3, 6), (6, 6), (7, None)])
def test_a_stop_string_within_bytes_counts_from_the_least_tokens_on(min_tokens, ends_at):
    tokenizer = TOKENIZERS["llama"]
    token_ids = ids_of(tokenizer, "<0xC3>", "<0xA9>", "<0x41>", "<0x41>", "<0xC3>", "<0xA9>", "x")
    options = TextOptions(stop=("é",), min_tokens=min_tokens)
    text = AnswerText(DetokenizerFactory(tokenizer)(skip_special_tokens=True), options)
    for token_id in token_ids:
        if text.matched_stop is None:
            text.add(token_id, FINISH_REASON_UNSPECIFIED)
    assert (text.num_tokens if text.matched_stop else None) == ends_at


# ---- at the HTTP API: a tokenizer that drops the blank before a text's first word ----

LLAMA_TOKENIZER = TOKENIZERS["llama"]
HELLO, WORLD = LLAMA_TOKENIZER.token_to_id("▁hello"), LLAMA_TOKENIZER.token_to_id("world")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def served(tmp_path, monkeypatch):
    def write(folder):
        write_fake_model(folder)
        LLAMA_TOKENIZER.save(str(folder / "tokenizer.json"))

    monkeypatch.setattr(scripted_nodes, "write_fake_model", write)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    return http_cluster(tmp_path, chat_template=str(tmp_path / "own.jinja"))


async def answered(c):
    """▁hello."""
    attempt, _ = await begin(c)
    await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, HELLO, events.LENGTH, logprob=-0.5)))
    await c.nodes["d0"].answer_cancel(attempt)


@pytest.mark.parametrize(
    ("fields", "text", "offsets"),
    [
        ({}, " hello", None),
        ({"logprobs": 0}, " hello", [0]),
        ({"logprobs": 0, "echo": True}, "hello hello", [0, 5]),
    ],
)
def test_a_completion(served, fields, text, offsets):
    async def scenario():
        async with served as (c, client):
            call = post(client, prompt=[HELLO], max_tokens=1, **fields)
            await answered(c)
            [choice] = (await call).json()["choices"]
            assert choice["text"] == text
            assert offsets is None or choice["logprobs"]["text_offset"] == offsets

    run(scenario())


@pytest.mark.parametrize(("goes_on", "text"), [(False, "hello"), (True, " hello")])
def test_a_chat_begins_a_text_of_its_own_unless_it_continues_a_message(served, goes_on, text):
    async def scenario():
        async with served as (c, client):
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "world"}]
            fields = {"continue_final_message": True, "add_generation_prompt": False} if goes_on else {}
            call = post(client, "/v1/chat/completions", messages=messages, max_tokens=1, **fields)
            await answered(c)
            [choice] = (await call).json()["choices"]
            assert choice["message"]["content"] == text

    run(scenario())
