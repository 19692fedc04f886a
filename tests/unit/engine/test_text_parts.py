"""Checkpoints of models that see pictures: their text through our decoder, against transformers' whole model."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config, text_names
from serving_core.node.needs import needs_of
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.lora_adapters import WEIGHTS, write_adapter, write_merged
from tests.tiny_models import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import greedy_answers

IMAGE = 255  # a token that no prompt has
PROMPTS = [list(b"The"), list(b"a longer prompt, of two blocks at least"), list(b"ab" * 30)]
NUM_TOKENS = 12
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
GEMMA = {"query_pre_attn_scalar": 7, "sliding_window": 13, "_sliding_window_pattern": 2}
GEMMA4 = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 13,
    "global_head_dim": 16,
}
QWEN3_5 = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 48,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
WHOLES = {  # what they are called in transformers, what their text has, and what they say of pictures
    "Gemma3": (GEMMA, {"mm_tokens_per_image": 4, "image_token_index": IMAGE}),
    "InternVL": ({}, {"image_token_id": IMAGE}),
    "Llava": ({}, {"image_token_index": IMAGE}),
    "Mistral3": ({"sliding_window": 13}, {"image_token_index": IMAGE}),
    # of transformers
    "Gemma4": (GEMMA4, {"image_token_id": IMAGE, "audio_config": None}),
    "Llama4": ({"num_local_experts": 2, "intermediate_size_mlp": 80, "attention_chunk_size": 16}, {}),
    "Qwen3_5": (QWEN3_5, {"image_token_id": IMAGE}),
}


@pytest.fixture
def make(tmp_path):
    """Writes a random model, and gives its folder."""

    def make(name, **whole):
        transformers.utils.logging.disable_progress_bar()
        text, pictures = WHOLES[name]
        kind = getattr(transformers, f"{name}Config")
        known = kind()
        configs = {
            "text_config": type(known.text_config)(**{**SIZES, **text}),
            "vision_config": known.vision_config and type(known.vision_config)(**VISION),
        }
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(kind(**configs, **pictures, **whole))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.25)
        model.save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name)
        return tmp_path / name

    return make


def settings(folder, **more):
    return EngineSettings(model=str(folder), num_kv_blocks=64, device="cpu", **more)


def answers(folder):
    return token_ids(run_all(build_engine(settings(folder)), PROMPTS, greedy(NUM_TOKENS, ignore_eos=True)))


def answers_of_the_whole(folder, name, drafts):
    """Return the answers of transformers' whole model; `drafts` as for `greedy_answers`."""
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return greedy_answers(model, PROMPTS, NUM_TOKENS, drafts, ignore_eos=True)


def rewrite(folder, change):
    """Has config.json changed in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", WHOLES)
def test_text_is_answered_as_by_the_whole_model(make, name):
    folder = make(name, tie_word_embeddings=name != "Llava")
    found = answers(folder)
    assert found == answers_of_the_whole(folder, name, found)


def test_names_of_newer_checkpoints_are_the_same_tensors(make):
    folder = make("Llava")
    before, file = answers(folder), folder / "model.safetensors"
    newer = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("vision_tower.", "model.vision_tower.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(newer, file)
    assert answers(folder) == before


def test_no_memory_is_counted_for_what_sees(make):
    folder = make("Gemma3")
    config = read_model_config(folder)
    text_bytes = sum(
        tensor.nbytes
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("language_model.")
    )
    assert needs_of(settings(folder), config).weight_bytes == text_bytes


def test_what_text_config_leaves_out_is_what_transformers_takes(make):
    folder = make("Gemma3")

    def leave_out(config):
        for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"):
            del config["text_config"][name]
        config["eos_token_id"] = [EOS, BOS]

    rewrite(folder, leave_out)
    (folder / "generation_config.json").unlink(missing_ok=True)
    found, known = read_model_config(folder), transformers.AutoConfig.from_pretrained(folder).text_config
    for name, theirs in {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}.items():
        assert getattr(found, name) == getattr(known, theirs)
    assert (found.vocab_size, found.head_dim) == (known.vocab_size, known.head_dim)
    assert found.rope.theta == known.rope_parameters["full_attention"]["rope_theta"]
    assert found.eos_token_ids == (EOS, BOS)


def test_what_cannot_be_served_of_them_is_a_sentence(make):
    folder = make("Gemma3")
    with pytest.raises(ModelError, match="our own decoders alone compute the text, not transformers"):
        read_model_config(folder, "transformers")
    rewrite(folder, lambda config: config["text_config"].update(no_such=3))
    with pytest.raises(ModelError, match="our own decoder of Gemma3ForCausalLM does not know no_such"):
        read_model_config(folder)
    rewrite(folder, lambda config: config["text_config"].update(model_type="mamba"))
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        read_model_config(folder)
    rewrite(folder, lambda config: config.update(text_config=[]))
    with pytest.raises(ModelError, match=r"text_config in .* must be an object in Gemma3ForConditionalGeneration"):
        read_model_config(folder)


def test_a_tensor_that_is_there_twice_is_refused():
    with pytest.raises(ModelError, match=r"both lm_head\.weight and language_model\.lm_head\.weight"):
        text_names(["lm_head.weight", "language_model.lm_head.weight"])


def test_a_tensor_of_neither_is_refused(make):
    folder = make("Llava")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "strange_tower.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"the weights hold strange_tower\.weight, which the model has no use for"):
        build_engine(settings(folder))


@pytest.mark.parametrize("root", few(["model.language_model.", "language_model.model."]))
def test_an_adapter_of_the_whole_model_changes_its_text(make, tmp_path, root):
    """PEFT calls layers as transformers does, or did."""
    folder = make("Gemma3", tie_word_embeddings=True)
    written = write_adapter(tmp_path / "adapter", folder, seed=1)
    merged = write_merged(tmp_path / "merged", folder, written)
    file = written / WEIGHTS
    names = {name: name.replace("language_model.model.", root) for name in load_file(file) if "vision" not in name}
    save_file({names[name]: tensor for name, tensor in load_file(file).items() if name in names}, file)
    engine = build_engine(settings(folder, lora=(f"a={written}",)))
    plain, found = (
        token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS, ignore_eos=True), adapters=[name] * len(PROMPTS)))
        for name in ("", "a")
    )
    assert plain == answers_of_the_whole(folder, "Gemma3", plain)
    assert found == answers_of_the_whole(merged, "Gemma3", found) != plain
