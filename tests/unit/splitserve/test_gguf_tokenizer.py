"""Tokenizers out of GGUF files: against transformers, which builds them of the same file by code of its own, and, where
the two differ, against what was worked out by hand."""

import asyncio
import unicodedata

import gguf
import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from coordinator.text.tokenizer import TokenLimit, read_tokenizer
from serving_core.errors import RequestError
from splitserve.gguf.folder import gguf_folder
from splitserve.gguf.tokenizer import SPLITTINGS
from tests.gguf_files import write

SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
USER_DEFINED = "<think>"
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 2024, isn't it? WE'LL SEE: 1234567 and 12,345.67!",
    "def f(x):\n    return x ** 2\n\n\n\tprint(f(3))  # done   ",
    "Naïve café — “quotes” and emoji 🙂🙃, 日本語テキスト, Ελληνικά",
    "camelCase HTTPServer XMLHttpRequest snake_case",
    "a  b   c    d\r\n\r\n e",
    "<s>turn<|turn|> <think>so it is</think></s>",
    "x",
]
ENOUGH = TokenLimit(10_000, lambda count: RequestError("X", str(count)))
WORDS = "\n".join(
    TEXTS[:-2] * 3 + ["111 222 123 1234 ''' ... --- \n\n \t\t  it's it'll IT'S", "the then they 2024 20 24"]
)


def train(normalizer, pre_tokenizer, alphabet):
    """A vocabulary whose merges go over every border at which text might be split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    lines = [line for text in WORDS.split("\n") for line in (text, text[len(text) // 2 :])]
    tokenizer.train_from_iterator(lines * 5, trainer)
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)


def train_bytes():
    return train(
        normalizers.Sequence([]),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.ByteLevel.alphabet(),
    )


def merges_of(tokens):
    """Pairs for every token of two parts or more, the earlier parts first, as a tokenizer's merges must have them."""
    known = set(tokens)
    return [f"{t[:cut]} {t[cut:]}" for t in tokens for cut in range(1, len(t)) if t[:cut] in known and t[cut:] in known]


@pytest.fixture(scope="module")
def byte_tokens():
    return train_bytes()


@pytest.fixture
def make(tmp_path):
    """Writes a file that has a tokenizer and the least of a model, and gives the file and the folder of it."""

    def make(kind, tokens, add):
        import numpy as np

        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        for set_size in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
            getattr(writer, f"add_{set_size}")(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_key_length(2)
        writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 2), np.float32))
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        types = [control if token in SPECIAL[1:] else normal for token in tokens]
        types[tokens.index(USER_DEFINED)] = gguf.TokenType.USER_DEFINED
        writer.add_token_types(types)
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index("</s>"))
        add(writer)
        write(writer)
        return tmp_path / "a.gguf", gguf_folder(tmp_path / "a.gguf", tmp_path / "cache")

    return make


@pytest.fixture
def make_bytes(make, byte_tokens):
    def make_bytes(pre, **adds):
        def add(writer):
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges(merges_of(byte_tokens))
            for name, value in adds.items():
                getattr(writer, f"add_{name}")(value)

        return make("gpt2", [*byte_tokens, *SPECIAL, USER_DEFINED], add)

    return make_bytes


def encode(folder, text, **options):
    return asyncio.run(read_tokenizer(folder).encode(text, ENOUGH, **options))


def decode(folder, token_ids):
    return asyncio.run(read_tokenizer(folder).decode(token_ids))


DIGITS_ALONE = {pre for pre, splitting in SPLITTINGS.items() if splitting.digits_alone}


@pytest.mark.parametrize("pre", sorted(set(SPLITTINGS) - DIGITS_ALONE - {"gpt-4o", "qwen35"}))  # unknown to its reader
def test_byte_level_ones_equal_those_of_transformers(make_bytes, pre):
    file, folder = make_bytes(pre, add_bos_token=False)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        token_ids = encode(folder, text)
        assert token_ids == theirs.encode(text, add_special_tokens=False), text
        assert decode(folder, token_ids) == text


CLASSES = {**dict.fromkeys(DIGITS_ALONE, transformers.CohereTokenizer), "qwen35": Qwen3_5Tokenizer}


@pytest.mark.parametrize("pre", sorted(CLASSES))
def test_the_others_equal_those_of_classes_of_transformers(make_bytes, byte_tokens, pre):
    _, folder = make_bytes(pre, add_bos_token=False)
    tokens = {token: token_id for token_id, token in enumerate([*byte_tokens, *SPECIAL, USER_DEFINED])}
    pairs = [tuple(merge.split(" ")) for merge in merges_of(byte_tokens)]
    theirs = CLASSES[pre](vocab=tokens, merges=pairs)
    for text in [*TEXTS[:-2], "हिन्दी में पाठ, नमस्ते"]:  # without special tokens, and with marks of their own
        assert encode(folder, text) == theirs.encode(text, add_special_tokens=False), text


def test_the_splitting_of_gpt_oss(make_bytes):
    """Words end at capitals, contractions stay with them, and digits are in threes."""
    _, folder = make_bytes("gpt-4o")
    split = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str
    pieces = [piece for piece, _ in split("Don't sayHello HELLOWorld's 12345 a/b//\n\n x")]
    assert pieces == ["Don't", "Ġsay", "Hello", "ĠHELLOWorld's", "Ġ", "123", "45", "Ġa", "/b", "//ĊĊ", "Ġx"]


@pytest.mark.nightly
def test_the_splittings_differ(make_bytes):
    """Else the test before this one would show little."""
    found = {pre: [encode(make_bytes(pre)[1], text, add_special_tokens=False) for text in TEXTS] for pre in SPLITTINGS}
    assert len({str(token_ids) for token_ids in found.values()}) == 6  # two of them differ in accents alone
    digits = {pre: read_tokenizer(make_bytes(pre)[1]) for pre in ("smollm", "llama-bpe")}
    assert len(asyncio.run(digits["smollm"].encode("2024", ENOUGH, add_special_tokens=False))) == 4


@pytest.mark.parametrize(
    ("pre", "plain"), [("qwen2", "deepseek-r1-qwen"), ("olmo", "gpt-2"), ("command-r", "refact"), ("qwen35", "dbrx")]
)
def test_some_compose_characters(make_bytes, pre, plain):
    composed, decomposed = "é", unicodedata.normalize("NFD", "é")
    assert encode(make_bytes(pre)[1], decomposed) == encode(make_bytes(pre)[1], composed)
    other = make_bytes(plain)[1]
    assert encode(other, decomposed) != encode(other, composed)


@pytest.mark.parametrize(
    ("pre", "adds", "ends"),
    [
        ("llama-bpe", {}, "<s>{}"),
        ("llama-bpe", {"add_bos_token": False}, "{}"),
        ("tekken", {}, "<s>{}"),
        ("qwen2", {}, "{}"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "<s>{}</s>"),
    ],
)
def test_what_goes_around_a_text(make_bytes, pre, adds, ends):
    _, folder = make_bytes(pre, **adds)
    assert decode(folder, encode(folder, "hi")) == ends.format("hi")
    assert decode(folder, encode(folder, "hi", add_special_tokens=False)) == "hi"


SPACE = "\u2581"


@pytest.fixture(scope="module")
def pieces():
    """SentencePiece's: three special ones, all bytes, and what was learnt."""
    learnt = train(normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]), None, [SPACE])
    return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), USER_DEFINED, *learnt]


@pytest.fixture
def make_pieces(make, pieces):
    def make_pieces(**adds):
        def add(writer):
            writer.add_token_scores([0.0] * 261 + [-float(place) for place in range(len(pieces) - 261)])
            writer.add_unk_token_id(0)
            for name, value in adds.items():
                getattr(writer, f"add_{name}")(value)

        return make("llama", pieces, add)

    return make_pieces


def test_sentencepiece_ones_equal_those_of_transformers(make_pieces):
    file, folder = make_pieces()
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS[:-2]:
        assert encode(folder, text) == theirs.encode(text), text
        assert decode(folder, encode(folder, text, add_special_tokens=False)) == text


def test_bytes_stand_for_what_is_in_no_piece(make_pieces, pieces):
    _, folder = make_pieces()
    token_ids = encode(folder, "ж", add_special_tokens=False)
    assert [pieces[token_id] for token_id in token_ids] == [SPACE, "<0xD0>", "<0xB6>"]
    assert decode(folder, token_ids) == "ж"


def test_a_space_is_put_before_a_text_unless_the_file_says_no(make_pieces, pieces):
    assert pieces[encode(make_pieces()[1], "the")[1]].startswith(SPACE)
    _, folder = make_pieces(add_space_prefix=False)
    token_ids = encode(folder, "the")
    assert not pieces[token_ids[1]].startswith(SPACE)
    assert decode(folder, token_ids) == "<s>the"
    assert decode(folder, encode(folder, " the")) == "<s> the"
