import json
import logging
import subprocess

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.model.llama import LlamaDecoder
from engine.model.weights import load_weights
from engine.native.library import ENVIRONMENT, OFF
from engine.parallel import alone
from serving_core.errors import ModelError
from serving_core.model_files import load_progress
from serving_core.model_files.config import read_model_config
from serving_core.settings import EngineSettings
from serving_core.sharding import shard_of
from tests import forked
from tests.effort import effort, few
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all
from tests.unit.engine import peak_process


def load(folder):
    return build_engine(EngineSettings(model=str(folder), num_kv_blocks=8))


@pytest.fixture
def edit(copied):
    """Return a function that has another one change the tensors of a tiny model, and gives the folder."""

    def edit(change, **config):
        folder = copied(write_tiny_model, **config)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return edit


def test_shards_hold_the_same_model(tmp_path):
    single = write_tiny_model(tmp_path / "single", seed=4)
    sharded = write_tiny_model(tmp_path / "sharded", seed=4, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    answers = [run_all(load(folder), [[1, 2, 3]], greedy(12)) for folder in (single, sharded)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("model_impl", ["splitserve", "transformers"])
def test_the_log_tells_how_much_is_loaded(tmp_path, caplog, monkeypatch, model_impl):
    for limit in ("LOG_SHARE", "LOG_EVERY_S"):
        monkeypatch.setattr(load_progress, limit, 0.0)
    caplog.set_level(logging.INFO)
    folder = write_tiny_model(tmp_path / "model", max_shard_size="60KB")
    tensors = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    build_engine(EngineSettings(model=str(folder), num_kv_blocks=8, model_impl=model_impl))
    begin, *_, last, end = (record for record in caplog.records if record.name == load_progress.__name__)
    assert begin.fields == {"num_bytes": sum(tensor.nbytes for tensor in tensors), "num_tensors": len(tensors)}
    assert last.getMessage().startswith("loading weights: 100% of ")
    assert end.getMessage().startswith("weights loaded in ")


def test_one_file_saved_over_several_is_the_model(tmp_path):
    """Which leaves their index, and sometimes them; transformers reads the one file, too."""
    folder = write_tiny_model(tmp_path / "both", seed=4, max_shard_size="60KB")
    single = write_tiny_model(tmp_path / "single", seed=5) / "model.safetensors"
    (folder / "model.safetensors").write_bytes(single.read_bytes())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).model.norm.weight
    assert torch.equal(theirs, load_file(single)["model.norm.weight"])
    expected = run_all(load(single.parent), [[1, 2, 3]], greedy(12))
    assert run_all(load(folder), [[1, 2, 3]], greedy(12)) == expected
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    assert run_all(load(folder), [[1, 2, 3]], greedy(12)) == expected


def test_missing_tensor(edit):
    folder = edit(lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ModelError, match=r"the weights lack model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load(folder)


def test_many_missing_tensors_are_counted(edit):
    def drop_layer(tensors):
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    with pytest.raises(ModelError, match=r"lack model\.layers\.2.* and 6 more$"):
        load(edit(drop_layer))


def test_unknown_tensor(edit):
    folder = edit(lambda tensors: tensors.update({"model.layers.0.mlp.experts.0.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"hold model\.layers\.0\.mlp\.experts\.0\.weight, which the model has no use"):
        load(folder)


def test_wrong_shape_names_both(edit):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = edit(lambda tensors: tensors.update({name: torch.zeros(80, 47)}))
    with pytest.raises(ModelError, match=rf"{name} has shape \[80, 47\], and the model wants \[80, 48\]"):
        load(folder)


def test_wrong_dtype(edit):
    folder = edit(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8; supported are F32, F16, BF16"):
        load(folder)


def test_stored_frequencies_are_ignored(edit):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(edit(lambda tensors: tensors.update({name: torch.zeros(6)})))


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("differs", [False, True])
def test_a_head_that_is_stored_beside_a_tied_embedding_computes_as_in_transformers(edit, differs, model_impl):
    def store_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(int(differs), 0).clone()

    folder = edit(store_head, tie_word_embeddings=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tied = theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert tied != differs
    expected = [1, 2, 3]
    for _ in range(12):
        expected.append(theirs(torch.tensor([expected])).logits[0, -1].argmax().item())
    engine = build_engine(EngineSettings(model=str(folder), num_kv_blocks=8, model_impl=model_impl))
    [tokens] = run_all(engine, [[1, 2, 3]], greedy(12, ignore_eos=True))
    assert [token.token_id for token in tokens] == expected[3:]


def test_no_weights(copied):
    folder = copied(write_tiny_model)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 3000, -10])
def test_truncated_file(copied, keep):
    folder = copied(write_tiny_model)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="is not a safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{", "is not JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "'../../etc/passwd', which is not a file beside it"),
        ('{"weight_map": {"a": 3}}', "which is not a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors, which is not in"),
    ],
)
def test_broken_index(copied, index, sentence):
    folder = copied(write_tiny_model)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=sentence):
        load(folder)


def load_rank(folder, rank, tp_size):
    """One rank's part of a model, which cannot compute: it has no group."""
    config, cpu = read_model_config(folder), torch.device("cpu")
    with torch.device("meta"):
        decoder = LlamaDecoder(config, cpu, shard_of(config, rank, tp_size), alone())
    load_weights(decoder, folder, torch.float32, cpu)
    return decoder


UNEVEN = {
    "hidden_size": 54,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 77,
    "vocab_size": 263,
    "attention_bias": True,
    "mlp_bias": True,
}
# Heads are 6 wide. Rank 0 of 2 has KV head 0 with query heads 0 to 2, rank 1 the others.
ROWS = {
    "q_proj": (slice(0, 18), slice(18, 54)),
    "k_proj": (slice(0, 6), slice(6, 18)),
    "v_proj": (slice(0, 6), slice(6, 18)),
    "gate_proj": (slice(0, 38), slice(38, 77)),
    "up_proj": (slice(0, 38), slice(38, 77)),
    "embed_tokens": (slice(0, 131), slice(131, 263)),
    "lm_head": (slice(0, 131), slice(131, 263)),
}
COLUMNS = {"o_proj": (slice(0, 18), slice(18, 54)), "down_proj": (slice(0, 38), slice(38, 77))}


def part_of(name, rank):
    """What the rank needs of a tensor, as an index."""
    module, kind = name.split(".")[-2:]
    if module in ROWS:
        return ROWS[module][rank]
    if module in COLUMNS and kind == "bias":
        return slice(None) if rank == 0 else slice(0)  # one rank adds it
    return (slice(None), COLUMNS[module][rank]) if module in COLUMNS else slice(None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_takes_its_own_parts_of_the_tensors_and_nothing_else(rank, tied, edit, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OFF)  # or weights would be packed
    wanted = {}

    def spoil_the_rest(tensors):
        for name, tensor in tensors.items():
            spoilt = torch.full_like(tensor, torch.nan)
            spoilt[part_of(name, rank)] = tensor[part_of(name, rank)]
            wanted[name] = tensor[part_of(name, rank)].clone()
            tensors[name] = spoilt

    folder = edit(spoil_the_rest, **UNEVEN, tie_word_embeddings=tied)
    parameters = dict(load_rank(folder, rank, 2).named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == sum(map(torch.numel, wanted.values()))
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.down_proj.bias"):
        assert torch.equal(parameters[f"layers.1.{name}"], wanted[f"model.layers.1.{name}"])
    qkv = [wanted[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(parameters["layers.2.self_attn.qkv_proj.weight"], torch.cat(qkv))
    assert torch.equal(parameters["embed_tokens.weight"], wanted["model.embed_tokens.weight"])


def test_every_rank_refuses_what_does_not_fit_the_whole_model(edit):
    name = "model.layers.0.self_attn.o_proj.bias"  # which rank 1 does not add
    folder = edit(lambda tensors: tensors.update({name: torch.zeros(55)}), **UNEVEN)
    with pytest.raises(ModelError, match=rf"{name} has shape \[55\], and the model wants \[54\]"):
        load_rank(folder, 1, 2)


@pytest.mark.parametrize("dtype", few(["bfloat16", "float32"]))
def test_memory_of_a_node_stays_near_that_of_its_weights(dtype, tmp_path):
    num_layers, vocab_size = effort((3, 10_000), (6, 20_000), (6, 20_000))
    folder = write_tiny_model(tmp_path, vocab_size=400, num_hidden_layers=num_layers)
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, head_dim=64, vocab_size=vocab_size)
    shapes = {
        "q_proj": (1024, 1024),
        "k_proj": (128, 1024),
        "v_proj": (128, 1024),
        "o_proj": (1024, 1024),
        "gate_proj": (4096, 1024),
        "up_proj": (4096, 1024),
        "down_proj": (1024, 4096),
        "embed_tokens": (vocab_size, 1024),
        "lm_head": (vocab_size, 1024),
    }
    tensors = {
        name: torch.full(shapes.get(name.split(".")[-2], (1024,)), 0.01, dtype=torch.bfloat16)
        for name in load_file(folder / "model.safetensors")
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    assert num_parameters > effort(60e6, 120e6, 120e6)
    del tensors

    process = forked.popen(peak_process.__name__, str(folder), dtype, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=600)
    assert int(output) <= num_parameters * {"bfloat16": 2, "float32": 4}[dtype] + 150e6
