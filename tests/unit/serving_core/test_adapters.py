"""Folders of LoRA adapters: what is read of them, and what is refused with one sentence before anything is loaded."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serving_core.errors import ModelError, SettingsError
from serving_core.model_files.adapter_names import MOST_ADAPTERS, adapters_in, parse_adapters
from serving_core.model_files.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_facts, read_adapters
from serving_core.model_files.config import read_model_config
from serving_core.node.needs import check_settings, needs_of
from serving_core.settings import EngineSettings
from tests.tiny_models import write_fake_model

SIZES = {
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "vocab_size": 20,
}
LAYERS = "base_model.model.model.layers"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
# As PEFT writes them, where they change nothing that is computed.
IDLE = {
    "base_model_name_or_path": "some/model",
    "eva_config": None,
    "inference_mode": True,
    "init_lora_weights": "gaussian",
    "layer_replication": None,
    "layers_pattern": None,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "modules_to_save": [],
    "qalora_group_size": 16,
    "rank_pattern": {},
    "task_type": "CAUSAL_LM",
    "use_dora": False,
}


def tensors(rank=2):
    shapes = {"self_attn.q_proj": (12, 6), "mlp.down_proj": (6, 10)}
    found = {}
    for layer in (0, 1):
        for name, (num_outputs, num_inputs) in shapes.items():
            found[f"{LAYERS}.{layer}.{name}.lora_A.weight"] = np.ones((rank, num_inputs), np.float32)
            found[f"{LAYERS}.{layer}.{name}.lora_B.weight"] = np.ones((num_outputs, rank), np.float16)
    return found


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({"w": np.ones((3, 5), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder)
    return folder


def write(folder, stored=None, **fields):
    (folder / CONFIG_FILE).write_text(json.dumps({**CONFIG, **fields}))
    save_file(tensors() if stored is None else stored, folder / WEIGHTS_FILE)


def read(model, folder):
    [adapter] = read_adapters([f"a={folder}"], read_model_config(model))
    return adapter


def test_what_is_read_of_an_adapter(model, folder):
    write(folder, **IDLE)
    adapter = read(model, folder)
    assert (adapter.name, adapter.rank, adapter.scale) == ("a", 2, 3.0)
    projections = {f"model.layers.{n}.{name}" for n in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}
    assert adapter.projections == projections
    assert adapter.num_elements == 2 * 2 * (12 + 6 + 6 + 10)
    write(folder, tensors(rank=9), r=9, use_rslora=True)
    assert read(model, folder).scale == 2.0


@pytest.mark.parametrize("root", ["", "model.language_model.", "language_model.model."])
def test_layers_have_other_names_in_models_without_a_head_or_with_pictures(model, folder, root):
    before = read(model, folder).projections
    other = f"base_model.model.{root}layers"
    renamed = {name.replace(LAYERS, other): tensor for name, tensor in tensors().items()}
    write(folder, renamed)
    assert read(model, folder).projections == before
    write(folder, {**renamed, f"{LAYERS}.0.{LAST}": np.ones((6, 2), np.float32)})
    with pytest.raises(ModelError, match="which is not LoRA of a projection in the model's layers"):
        read(model, folder)


def test_its_digest_stands_for_its_content(model, folder):
    def digest(**fields):
        write(folder, **fields)
        return read(model, folder).digest()

    first = digest()
    assert digest(**IDLE) == first
    others = {digest(lora_alpha=7), digest(stored={**tensors(), f"{LAYERS}.0.{LAST}": np.ones((6, 2), np.float32)})}
    assert len({first, *others}) == 3
    write(folder)
    facts = adapter_facts(read_adapters([f"b={folder}", f"a={folder}"], read_model_config(model)))
    assert facts == {"lora:a": first, "lora:b": first}
    assert adapters_in({"dtype": "", **facts}) == ["a", "b"]


LAST = "mlp.down_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"use_dora": True}, "use_dora in .* is not supported: it is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save in .* is not supported: it is \\['lm_head'\\]"),
        ({"bias": "lora_only"}, "bias in .* is not supported: it is 'lora_only'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern in .* is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern in .* is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out in .* is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights in .* is not supported: it is 'pissa_niter_4'"),
        ({"of_a_later_version": {"x": 1}}, "of_a_later_version in .* is not supported: it is {'x': 1}"),
        ({"peft_type": "IA3"}, "peft_type in .* is not supported: it is 'IA3'"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"r": 0}, "r in .* must be an integer of at least 1"),
        ({"r": 513}, "r in .* must be at most 512, not 513"),
        ({"r": 3}, r"lora_A.weight in .* has shape \[2, 10\], and \[3, 10\] fits the model and r in"),
        ({"lora_alpha": 0}, "lora_alpha in .* must be above 0"),
        ({"lora_alpha": "6"}, "lora_alpha in .* must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha in .* must be a finite number"),
        ({"use_rslora": 1}, "use_rslora in .* must be true or false"),
        ({"target_modules": ["q_proj", [], "o_proj"]}, "means model.layers.0.self_attn.o_proj too, and .* lacks it"),
    ],
)
def test_configs_that_are_refused(fields, sentence, model, folder):
    write(folder, **fields)
    with pytest.raises(ModelError, match=sentence):
        read(model, folder)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (f"{LAYERS}.1.{LAST}", None, f"lacks {LAYERS}.1.{LAST}"),
        (f"{LAYERS}.1.{LAST}", np.ones((6, 3), np.float32), r"has shape \[6, 3\], and \[6, 2\] fits"),
        (f"{LAYERS}.1.{LAST}", np.ones((6, 2), np.int32), "is stored as I32; supported are F32, F16, BF16"),
        (f"{LAYERS}.2.{LAST}", np.ones((6, 2), np.float32), f"holds {LAYERS}.2.{LAST}, which is not LoRA of a proj"),
        (f"{LAYERS}.01.{LAST}", np.ones((6, 2), np.float32), "which is not LoRA of a projection"),
        ("base_model.model.lm_head.lora_A.weight", np.ones((2, 6), np.float32), "holds base_model.model.lm_head"),
        (f"{LAYERS}.0.mlp.down_proj.lora_magnitude_vector", np.ones(6, np.float32), "holds .*lora_magnitude_vector, w"),
        ("x" * 5000, np.ones(6, np.float32), "holds x{200}, which"),
    ],
)
def test_tensors_that_are_refused(name, value, sentence, model, folder):
    stored = {**tensors(), name: value}
    write(folder, {name: value for name, value in stored.items() if value is not None})
    with pytest.raises(ModelError, match=sentence):
        read(model, folder)


def test_an_adapter_of_fewer_layers_is_refused_unless_it_says_so(model, folder):
    first = {name: value for name, value in tensors().items() if f"{LAYERS}.0." in name}
    write(folder, first)
    with pytest.raises(ModelError, match=r"means model.layers.1.self_attn.q_proj too, and .* lacks it"):
        read(model, folder)
    write(folder, first, layers_to_transform=[0])
    assert len(read(model, folder).projections) == 2


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"target_modules": ["q_proj", "o_proj"]}, None),
        ({"use_dora": True}, None),
        ({}, {"x": np.ones(6, np.float32)}),
        ({}, {}),
    ],
)
def test_of_several_adapters_the_one_that_is_refused_is_named(model, folder, tmp_path, fields, stored):
    other = tmp_path / "other"
    other.mkdir()
    write(other, stored, **fields)
    with pytest.raises(ModelError, match=r"^adapter org/second: "):
        read_adapters([f"first={folder}", f"org/second={other}", f"third={folder}"], read_model_config(model))


def test_files_that_are_not_there_or_not_whole(model, folder, tmp_path):
    file, config = folder / WEIGHTS_FILE, folder / CONFIG_FILE
    whole, text = file.read_bytes(), config.read_text()
    for content in (b"", whole[:40], whole[:-1], b"\xff" * 100, b"\x80\x04."):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="is not a whole safetensors file"):
            read(model, folder)
    save_file({}, file)
    with pytest.raises(ModelError, match="holds no tensors"):
        read(model, folder)
    file.unlink()
    with pytest.raises(ModelError, match="the weights of an adapter must be safetensors"):
        read(model, folder)
    for broken in ("", "[]", "[" * 100_000, text[:-1]):
        config.write_text(broken)
        with pytest.raises(ModelError):
            read(model, folder)
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path / 'no' / CONFIG_FILE} cannot be read")):
        read(model, tmp_path / "no")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["a"], "must be NAME=FOLDER"),
        (["a="], "must be NAME=FOLDER"),
        (["=b"], "must be NAME=FOLDER"),
        (["é=b"], "must be NAME=FOLDER"),
        ([f"{'a' * 129}=b"], "must be NAME=FOLDER"),
        (["a=b", "a=c"], "names a twice"),
        ([f"{n}=b" for n in range(MOST_ADAPTERS + 1)], "is given 65 times, the limit is 64"),
    ],
)
def test_what_the_flag_must_be(given, sentence):
    with pytest.raises(SettingsError, match=sentence):
        parse_adapters(given)


def test_a_folder_may_have_any_name():
    assert {name: str(folder) for name, folder in parse_adapters(["org/a.v1=/b=c d"]).items()} == {"org/a.v1": "/b=c d"}


def test_adapters_count_among_what_a_node_needs(model, folder):
    settings = EngineSettings(model=str(model), num_kv_blocks=3, dtype="bfloat16")
    config = read_model_config(model)
    with_adapter = EngineSettings(model=str(model), num_kv_blocks=3, dtype="bfloat16", lora=(f"a={folder}",))
    more = needs_of(with_adapter, config).weight_bytes - needs_of(settings, config).weight_bytes
    assert more == 2 * sum(value.size for value in load_file(folder / WEIGHTS_FILE).values())


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_models_that_take_no_adapters(model_impl, model, tmp_path):
    folder = write_fake_model(tmp_path / "fake") if model_impl == "auto" else model
    settings = EngineSettings(model=str(folder), model_impl=model_impl, lora=("a=b",))
    with pytest.raises(SettingsError, match="--lora: "):
        check_settings(settings, read_model_config(folder, model_impl), 1)
