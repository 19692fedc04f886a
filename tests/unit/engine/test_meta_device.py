"""What must hold where there is a device beside the CPU, on torch's meta device, which computes nothing: no step of a
decoder mixes devices, and none reads back what the device holds, which would make the host wait and end a CUDA graph's
capture."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import engine.forward_batch
from engine.attention.varlen import VarlenAttention
from engine.cache.kv_pool import PagedKVPool
from engine.cuda_graphs import StaticDecode
from engine.forward_batch import build_batch
from engine.model.layers import Layer, Linear
from engine.model.llama import LlamaDecoder
from engine.parallel import alone
from serving_core.model_files.config import read_model_config
from serving_core.requests import Share
from serving_core.settings import INPUT_BITS, WEIGHT_BITS
from serving_core.sharding import shard_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model
from tests.unit.engine.histories_kit import run_program

META = torch.device("meta")
BLOCK_SIZE, NUM_BLOCKS = 256, 8
DECODE = [Share([5], 10 + row, [row], samples=True) for row in range(3)]
PROMPTS = [Share([1, 2, 3], 0, [0], samples=True), Share([4], 300, [1, 2], samples=True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family, dtype="bfloat16", head_dim=64) for family in FAMILIES}


@pytest.fixture
def configs(folders):
    """Those of models, which are written before tensors are fakes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield {family: read_model_config(folder) for family, folder in folders.items()}


def load(config, quantization="none"):
    """A decoder whose weights and pool are there in name only."""
    with META:
        decoder = LlamaDecoder(config, META, shard_of(config, 0, 1), alone())
    for module in list(decoder.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=torch.bfloat16, device=META)
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))
        if isinstance(module, Layer):
            module.pack(WEIGHT_BITS.get(quantization))
        if isinstance(module, Linear):
            module.round_inputs(INPUT_BITS.get(quantization, 16))
    pool = PagedKVPool(config.kv_layout(BLOCK_SIZE, "bfloat16"), NUM_BLOCKS + 1, META, torch.bfloat16)
    return decoder, VarlenAttention(pool)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("mistral", "none"),  # windows
        ("qwen3", "none"),  # norms of heads
        ("llama", "w8a8"),
        pytest.param("llama", "none", marks=pytest.mark.nightly),
        pytest.param("qwen2", "none", marks=pytest.mark.nightly),
    ],
)
def test_a_step_awaits_nothing(configs, family, quantization):
    decoder, attention = load(configs[family], quantization)
    logits = decoder(build_batch(PROMPTS, BLOCK_SIZE, META), attention)
    assert (logits.device, logits.shape) == (META, (2, VOCAB_SIZE))


def test_nor_does_what_a_graph_is_captured_of(configs):
    decoder, attention = load(configs["qwen3"])
    captured = []

    def capture(function):
        function()
        captured.append(function)
        return function

    program = StaticDecode(decoder, attention, NUM_BLOCKS, 1024, capture)
    assert len(captured) == len(program.sizes)
    batch = build_batch(DECODE, BLOCK_SIZE, META)
    assert program.plan(batch) is not None
    assert run_program(program, batch).shape == (len(DECODE), VOCAB_SIZE)


def test_a_tensor_on_the_cpu_would_be_seen(configs, monkeypatch):
    decoder, attention = load(configs["llama"])
    monkeypatch.setattr(engine.forward_batch, "_moved", lambda tensor, device: tensor)
    with pytest.raises(RuntimeError, match="device"):
        decoder(build_batch(PROMPTS, BLOCK_SIZE, META), attention)
