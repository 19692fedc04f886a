"""The folder of a GGUF file: made once of all that the header says, found by content, and refused in one sentence."""

import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.text.tokenizer import read_tokenizer
from serving_core.errors import ModelError
from serving_core.model_files.config import Embedder, read_model_config
from serving_core.model_files.fingerprint import fingerprint
from serving_core.model_files.gguf_header import read_header
from serving_core.model_files.rope import DefaultRope, FactorRope, LinearRope, YarnRope
from serving_core.node.needs import needs_of
from serving_core.requests import LAST, MEAN
from serving_core.settings import EngineSettings
from splitserve.gguf.folder import gguf_folder
from splitserve.launch.models import LocalModel, resolve
from tests.gguf_files import MERGES, TOKENS, replace, write, write_gguf
from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS, FAMILIES

Kind = gguf.GGUFValueType


@pytest.fixture
def make(tmp_path):
    """Writes a file with some metadata replaced, and gives its folder."""

    def make(family="llama", said=(), **options):
        def change(writer):
            for key, value in dict(said).items():
                kind = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}.get(type(value))
                replace(writer, key, value, kind or Kind.ARRAY)

        options.setdefault("change", change)
        return gguf_folder(write_gguf(tmp_path / "tiny.gguf", family, **options), tmp_path / "cache")

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_the_config_is_that_of_the_model_it_was_made_of(make, tmp_path, family, tie_word_embeddings):
    config = {"sliding_window": None} if family == "mistral" else {}
    rope = {"rope_type": "default", "rope_theta": 250_000.0}
    folder = make(family, tie_word_embeddings=tie_word_embeddings, rope_parameters=rope, rms_norm_eps=1e-5, **config)
    found, written = read_model_config(folder), read_model_config(tmp_path / "tiny")
    differ = {"dtype", "rms_norm_eps"} | ({"architecture", "model_type"} if family == "mistral" else set())
    for field in set(written.__dataclass_fields__) - differ:
        assert getattr(found, field) == getattr(written, field), field
    assert found.rms_norm_eps == np.float32(written.rms_norm_eps)
    assert (found.dtype, found.bos_token_id, found.eos_token_ids) == ("bfloat16", BOS, (EOS,))


@pytest.mark.parametrize(("number", "kind"), [(1, MEAN), (3, LAST)])
def test_a_file_may_say_how_it_pools(make, number, kind):
    assert read_model_config(make()).embedder is None
    folder = make("qwen3", {"qwen3.pooling_type": number})
    assert read_model_config(folder).embedder == Embedder(kind, normalizes=True)
    with pytest.raises(ModelError, match="says pooling_type 2, and a model with that cannot be served"):
        make("qwen3", {"qwen3.pooling_type": 2})


def windows(folder):
    return [window is not None for window in read_model_config(folder).sliding_windows]


SIX_LAYERS = {"num_hidden_layers": 6, "query_pre_attn_scalar": 16, "layer_types": None}


def test_which_layers_of_gemma_have_windows_the_file_may_say(make):
    assert windows(make("gemma2", **SIX_LAYERS)) == [True, False] * 3
    assert windows(make("gemma3", **SIX_LAYERS)) == [True] * 5 + [False]
    by_period = {"gemma3.attention.sliding_window_pattern": 3}
    assert windows(make("gemma3", by_period, **SIX_LAYERS)) == [True, True, False] * 2
    listed = [True, False, False, True, True, False]
    assert windows(make("gemma3", {"gemma3.attention.sliding_window_pattern": listed}, **SIX_LAYERS)) == listed


@pytest.mark.parametrize(
    ("family", "num_layers"), [("gemma2", 46), pytest.param("gemma3", 62, marks=pytest.mark.nightly)]
)
def test_scores_of_the_27b_gemmas_go_by_the_width_of_the_model_for_each_head(make, family, num_layers):
    width, key_length = 64, 16
    small = {**SIX_LAYERS, "num_attention_heads": 2, "intermediate_size": 8}
    scales = [
        read_model_config(make(family, **{**small, "num_hidden_layers": layers})).differences.score_scale
        for layers in (num_layers, 6)
    ]
    assert scales == [(width / 2) ** -0.5, key_length**-0.5]


def test_what_the_file_does_not_say_of_gemma_is_what_llama_cpp_knows(make):
    """The caps of Gemma 2 are 50 and 30."""
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    differences = read_model_config(make("gemma2", **SIX_LAYERS, **caps)).differences
    assert (differences.score_softcap, differences.logit_softcap) == (50.0, 30.0)
    said = {"gemma3.rope.freq_base_swa": 20_000.0, "gemma3.final_logit_softcapping": 7.0}
    differences = read_model_config(make("gemma3", said, **SIX_LAYERS)).differences
    assert (differences.sliding_rope, differences.logit_softcap) == (DefaultRope(20_000.0), 7.0)


@pytest.mark.parametrize(
    ("family", "said", "sentence"),
    [
        ("gemma", {"gemma.final_logit_softcapping": 5.0}, r"says final_logit_softcapping 5\.0"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 5.0}, r"says attn_logit_softcapping 5\.0"),
        ("gemma2", {"gemma2.attn_logit_softcapping": -5.0}, "attn_logit_softcapping in .* finite number of at least 0"),
        ("gemma2", {"gemma2.attention.sliding_window": 0}, "sliding_window in .* must be an integer of at least 1"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [True]}, "a list of 4 times true or false"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": "some"}, "sliding_window_pattern in .* an integer"),
        ("gemma3", {"gemma3.rope.scaling.type": "yarn", "gemma3.rope.scaling.original_context_length": 9}, "'yarn'"),
    ],
)
def test_what_gemma_cannot_have_is_a_sentence(make, family, said, sentence):
    with pytest.raises(ModelError, match=sentence):
        make(family, said, **({} if family == "gemma" else {"query_pre_attn_scalar": 16}))


def test_the_turn_of_gemma_ends_an_answer(make):
    tokens = [*TOKENS[:-1], "<end_of_turn>"]
    merges = [merge for merge in MERGES if "".join(merge.split()) in tokens]
    folder = make(said={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges})
    assert read_model_config(folder).eos_token_ids == (EOS, len(TOKENS) - 1)


ROPES = {
    "as it is": ({}, DefaultRope(10_000.0)),
    "by name": ({"llama.rope.scaling.type": "none"}, DefaultRope(10_000.0)),
    "linear": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearRope(10_000.0, 4.0)),
    "linear, unsaid": ({"llama.rope.scaling.factor": 4.0}, LinearRope(10_000.0, 4.0)),
    "linear, of old": ({"llama.rope.scale_linear": 2.0}, LinearRope(10_000.0, 2.0)),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 256,
            "llama.rope.scaling.finetuned": True,
        },
        YarnRope(10_000.0, 4.0, 256, 32.0, 1.0, 1.1386294361119891, True),
    ),
}


@pytest.mark.parametrize(("said", "rope"), ROPES.values(), ids=ROPES)
def test_ropes(make, said, rope):
    assert read_model_config(make(said=said)).rope == rope


def test_a_rope_of_factors_is_part_of_what_a_folder_is_made_of(make):
    def factors(last):
        return lambda writer: writer.add_tensor("rope_freqs.weight", np.array([1.0] * 7 + [last], np.float32))

    one, other = make(change=factors(8.0)), make(change=factors(32.0))
    assert read_model_config(one).rope == FactorRope(10_000.0, (1.0,) * 7 + (8.0,))
    assert read_model_config(other).rope == FactorRope(10_000.0, (1.0,) * 7 + (32.0,))


REFUSED = {
    "another architecture": (
        {"general.architecture": "mamba"},
        "'mamba'; supported are cohere2, command-r, gemma, gemma2, gemma3, gpt-oss, granite, lfm2, llama, olmo2,",
    ),
    "experts": ({"llama.expert_used_count": 2}, "says expert_used_count 2, and a model with that cannot be served"),
    "a soft cap": ({"llama.attn_logit_softcapping": 30.0}, r"says attn_logit_softcapping 30\.0"),
    "an encoder": ({"llama.attention.causal": False}, "says attention.causal False"),
    "a scaled yarn": ({"llama.rope.scaling.attn_factor": 0.5}, r"says rope\.scaling\.attn_factor 0\.5"),
    "a part of several": (
        {"split.count": 3},
        "says that it is part 1 of 3, and is read as part 1 of 1: parts are",
    ),
    "another rope": ({"llama.rope.scaling.type": "longrope"}, "must be none, linear or yarn, not 'longrope'"),
    "half a head rotated": ({"llama.rope.dimension_count": 8}, r"as large as a head \(16\), not 8"),
    "narrow values": ({"llama.attention.value_length": 8}, r"as large as a head \(16\), not 8"),
    "a window": ({"llama.attention.sliding_window": 64}, r"must be absent, 0 or the context \(1024\), not 64"),
    "heads by layer": ({"llama.attention.head_count_kv": [2, 2, 1]}, "must be an integer of at least 1"),
    "no heads": ({"llama.attention.head_count": 0}, "must be an integer of at least 1"),
    "layers without end": ({"llama.block_count": 2**31 - 1}, "at most 1024"),
    "no number": ({"llama.rope.freq_base": float("nan")}, "a finite number"),
    "heads that do not divide": ({"llama.attention.head_count_kv": 3}, "a divisor of num_attention_heads"),
    "an ending outside": ({"tokenizer.ggml.eos_token_id": 10_000}, "below the number of tokens"),
    "a tokenizer of another kind": ({"tokenizer.ggml.model": "t5"}, "kind 't5'; supported are gpt2 and llama"),
    "an unknown splitting": ({"tokenizer.ggml.pre": "poro-chat"}, "splits text as 'poro-chat' is not supported"),
    "few tokens": ({"tokenizer.ggml.tokens": ["a"] * 2}, "tokens of the vocabulary are there twice"),
    "many tokens": (
        {"tokenizer.ggml.tokens": [*TOKENS, "more"], "tokenizer.ggml.token_type": [1] * 265},
        "265 tokens, and 264 rows of embeddings",
    ),
    "a long token": ({"tokenizer.ggml.tokens": ["a" * 2000]}, "a token of 2000 characters"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1, 2, 3]}, "must be a list of texts"),
    "a merge of three": ({"tokenizer.ggml.merges": ["a b c"]}, "a list of pairs"),
    "a merge to no token": ({"tokenizer.ggml.merges": ["z z"]}, "is broken: .*zz"),
    "types for some": ({"tokenizer.ggml.token_type": [1, 1]}, "no token_type for each of its 264 tokens"),
    "a template that is none": ({"tokenizer.chat_template": "{% for"}, "template"),
}


@pytest.mark.parametrize(("said", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_a_sentence_and_leaves_nothing(make, tmp_path, said, sentence):
    with pytest.raises(ModelError, match=sentence):
        make(said=said)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("gone", ["general.architecture", "llama.block_count", "tokenizer.ggml.model"])
def test_what_is_missing_is_named(make, gone):
    with pytest.raises(ModelError, match=f"{gone.split('.', 1)[1].removeprefix('ggml.')} is missing in tiny.gguf"):
        make(change=lambda writer: writer.kv_data[0].pop(gone))


def test_a_vocabulary_without_embeddings_is_refused(make):
    with pytest.raises(ModelError, match=r"lacks token_embd\.weight"):
        make(change=lambda writer: writer.tensors[0].pop("token_embd.weight"))


def test_defaults_template_and_endings_come_along(make, tmp_path):
    said = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "tokenizer.ggml.eot_token_id": 259}
    folder = make(said=said)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": BOS,
        "eos_token_id": [EOS, 259],
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 20,
    }
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["bos_token"], config["eos_token"]) == (CHAT_TEMPLATE, "<|bos|>", "<|eos|>")
    given = gguf_folder(tmp_path / "tiny.gguf", tmp_path / "other", {"temperature": 0.1})
    assert json.loads((given / "generation_config.json").read_text())["temperature"] == 0.1


@pytest.mark.parametrize("name", ["<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>", "<EOT>"])
def test_tokens_that_end_turns_end_answers(name, make):
    tokens = [*TOKENS[:-1], name]
    folder = make(said={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["h e"]})
    assert read_model_config(folder).eos_token_ids == (EOS, len(tokens) - 1)


def test_it_is_made_once_and_found_by_content(make, tmp_path):
    folder = make()
    made_at = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(tmp_path / "tiny.gguf", tmp_path / "cache") == folder
    assert (folder / "config.json").stat().st_mtime_ns == made_at
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]
    before = (tmp_path / "tiny.gguf").stat()
    other = make(said={"llama.rope.freq_base": 20_000.0})
    assert (tmp_path / "tiny.gguf").stat().st_size == before.st_size
    assert other != folder
    assert read_model_config(other).rope == DefaultRope(20_000.0)
    again = make()
    assert again == folder


def test_a_file_beside_it_with_the_same_header_has_a_folder_of_its_own(make, tmp_path):
    folder = make()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes((tmp_path / "tiny.gguf").read_bytes())
    other = gguf_folder(copy, tmp_path / "cache")
    assert (other / "model.gguf").resolve() == copy != (folder / "model.gguf").resolve()


def facts_of(folder):
    config = read_model_config(folder)
    return fingerprint(folder, config, config.kv_layout(16, "bfloat16"), "bfloat16")


def test_the_fingerprint_is_that_of_the_content_wherever_it_lies(make, tmp_path):
    facts = facts_of(make())
    copy = tmp_path / "elsewhere.gguf"
    content = (tmp_path / "tiny.gguf").read_bytes()
    copy.write_bytes(content)
    assert facts_of(gguf_folder(copy, tmp_path / "cache")) == facts
    assert facts_of(make(stored="F16"))["weights"] != facts["weights"]
    tuned = facts_of(make(seed=1))
    assert {name for name in facts if facts[name] != tuned[name]} == {"weights"}
    with copy.open("rb") as stream:
        size = len(read_header(stream, "a").content)
    edges = content[: max(2**20, size + 2**20)] + content[-(2**20) :]
    assert facts["weights"] == hashlib.sha256(len(content).to_bytes(8, "little") + edges).hexdigest()


@pytest.mark.parametrize(("stored", "dtype", "quantization"), [("F32", "auto", "none"), ("Q4_0", "auto", "int8")])
def test_its_needs_are_those_of_what_is_loaded(make, tmp_path, stored, dtype, quantization):
    folder = make(stored=stored)
    settings = {"dtype": dtype, "quantization": quantization, "num_kv_blocks": 8}
    found = needs_of(EngineSettings(model=str(folder), **settings), read_model_config(folder))
    written = tmp_path / "tiny"
    settings["dtype"] = "bfloat16"
    assert found == needs_of(EngineSettings(model=str(written), **settings), read_model_config(written))


def test_a_file_is_a_model_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "Tiny-Q4.gguf")
    link = tmp_path / "linked.gguf"
    link.symlink_to(file)
    found = resolve(str(file), pytest.fail)
    assert (found.name, found.folder.parent) == ("Tiny-Q4", tmp_path / "cache" / "splitserve" / "gguf")
    assert resolve(str(link), pytest.fail) == LocalModel(found.folder, "linked")


def test_any_other_file_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "notes.txt").write_text("GGU")
    with pytest.raises(ModelError, match=r"^notes\.txt is not a GGUF file that can be served: "):
        resolve(str(tmp_path / "notes.txt"), pytest.fail)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "cache").touch()
    with pytest.raises(ModelError, match=r"what .*tiny\.gguf says cannot be stored in .*: "):
        gguf_folder(file, tmp_path / "cache")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", stored="Q8_0")


def served_or_refused(file, cache):
    """As tokenizers, templates and configs are made of what a file says, these must take or refuse it, too."""
    try:
        folder = gguf_folder(file, cache)
    except ModelError:
        return
    read_model_config(folder)
    read_tokenizer(folder)


anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@anything
@given(seed=st.integers(0, 2**32))
def test_whatever_bytes_are_changed_it_is_served_or_refused(tiny, tmp_path, seed):
    content, rng = bytearray(tiny.read_bytes()), random.Random(seed)
    with tiny.open("rb") as stream:
        size = len(read_header(stream, "a").content)
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(24, size)] = rng.choice([0, 1, 2, 3, 8, 32, 126, 127, 255, rng.randrange(256)])
    file = tmp_path / "changed.gguf"
    file.write_bytes(content)
    served_or_refused(file, tmp_path / "cache")


MORE_KEYS = [
    "tokenizer.ggml.eot_token_id",
    "general.sampling.temp",
    "general.sampling.top_k",
    "llama.rope.scaling.type",
]
MORE_KEYS += ["llama.rope.scaling.factor", "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "general.alignment"]
MORE_KEYS += ["tokenizer.ggml.add_space_prefix", "split.count", "llama.attention.sliding_window"]
VALUES = st.one_of(
    st.none(),
    st.tuples(st.just(Kind.UINT64), st.sampled_from([0, 1, 3, 260, 2**31, 2**64 - 1])),
    st.tuples(st.just(Kind.INT32), st.integers(-3, 3)),
    st.tuples(st.just(Kind.FLOAT32), st.sampled_from([0.0, -1.0, 0.5, float("nan"), float("inf")])),
    st.tuples(st.just(Kind.BOOL), st.booleans()),
    st.tuples(st.just(Kind.STRING), st.sampled_from(["", "llama", "gpt2", "yarn", "none", "{% if", "\x00"])),
    st.tuples(st.just(Kind.ARRAY), st.sampled_from([[1], [0.5] * 264, ["a"], ["a b"], [str(i) for i in range(264)]])),
)


@anything
@given(data=st.data())
def test_whatever_it_says_it_is_served_or_refused(tiny, tmp_path, data):
    with tiny.open("rb") as stream:
        header = read_header(stream, "a")
    kinds = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    said = {key: (kinds.get(type(value), Kind.ARRAY), value) for key, value in header.metadata.items()}
    keys = st.lists(st.sampled_from(sorted({*said, *MORE_KEYS})), min_size=1, max_size=3, unique=True)
    said |= {key: data.draw(VALUES) for key in data.draw(keys)}
    writer = gguf.GGUFWriter(tmp_path / "says.gguf", "llama")
    writer.kv_data[0].clear()
    for key, value in said.items():
        if value is not None:
            writer.add_key_value(key, list(value[1]) if value[0] is Kind.ARRAY else value[1], value[0])
    for name, tensor in header.tensors.items():
        writer.add_tensor(name, np.zeros(tensor.shape, np.float32))
    write(writer)
    served_or_refused(tmp_path / "says.gguf", tmp_path / "cache")


def test_processes_that_make_it_at_once_make_one(tiny, tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(lambda _: gguf_folder(tiny, tmp_path / "cache"), range(8)))
    assert [folder.name for folder in folders] == [path.name for path in (tmp_path / "cache").iterdir()]
