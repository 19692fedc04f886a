"""What one node computes: a model, its KV pool and the choice of the next tokens. Knows no network and no role."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from engine.attention import Attention
from engine.backends import choose_attention
from engine.errors import SettingsError
from engine.fake import FakeModel
from engine.fingerprint import fingerprint
from engine.forward_batch import ForwardBatch, build_batch
from engine.kv_pool import PagedKVPool
from engine.layout import KVLayout
from engine.llama import LlamaDecoder
from engine.model_config import FAKE_ARCHITECTURE, ModelConfig, read_model_config
from engine.requests import OnLayer, Request, SampledToken, SamplingParams, Work
from engine.sampler import sample
from engine.settings import EngineSettings
from engine.weights import load_weights

WARM_UP_TOKENS: Final = 256


class Model(Protocol):
    """A decoder, or the fake."""

    def __call__(self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Writes the batch's KV into the attention's pool; gives the logits [S, vocab_size] of the wanted rows."""


class Engine:
    """One loaded model. All methods are to be called by one thread at a time."""

    def __init__(self, settings: EngineSettings) -> None:
        """Loads everything. Raises ModelError or SettingsError with one sentence when that cannot be."""
        if not settings.model:
            raise SettingsError("no model folder was given")
        folder = Path(settings.model)
        device = _device(settings.device)
        self.config: Final = read_model_config(folder)
        dtype = self.config.dtype if settings.dtype == "auto" else settings.dtype
        self.layout: Final = self.config.kv_layout(settings.block_size, dtype)
        self.max_model_len: Final = _max_model_len(settings, self.config)
        self.num_blocks: Final = _num_blocks(settings, self.layout)
        self.eos_token_ids: Final = self.config.eos_token_ids
        self.fingerprint: Final = fingerprint(folder, self.config, self.layout)
        self._device = device
        self._model = _build_model(folder, self.config, dtype, device)
        self.pool: Final = PagedKVPool(self.layout, self.num_blocks, device)
        self._attention = choose_attention(self.pool, self.config.num_heads)
        self.description: Final = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "dtype": dtype,
            "attention": self._attention.name,
            "threads": str(torch.get_num_threads()),
        }

    @torch.inference_mode()
    def step(self, works: Sequence[Work], on_layer: OnLayer | None = None) -> list[SampledToken]:
        """Computes these shares; gives one token for each that samples, in order. Changes no request."""
        batch = build_batch(works, self.layout.block_size, self._device)
        logits = self._model(batch, self._attention, on_layer)
        requests = [work.request for work in works if work.samples]
        return sample(logits, requests, self.eos_token_ids) if requests else []

    def warm_up(self) -> None:
        """Pays the costs of first calls. To be called before anything is in the pool."""
        num_tokens = min(WARM_UP_TOKENS, self.max_model_len, self.num_blocks * self.layout.block_size)
        request = Request("warm-up", 0, [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1, temperature=0))
        blocks = range(self.layout.num_blocks_for(num_tokens))
        self.step([Work(request, 0, num_tokens, blocks)])
        self.step([Work(request, num_tokens - 1, 1, blocks)])


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: there is no CUDA device here")
    return torch.device(name)


def _max_model_len(settings: EngineSettings, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if settings.max_model_len > limit:
        raise SettingsError(f"--max-model-len {settings.max_model_len} is more than the model's {limit}")
    return settings.max_model_len or limit


def _num_blocks(settings: EngineSettings, layout: KVLayout) -> int:
    if settings.num_kv_blocks:
        return settings.num_kv_blocks
    num_blocks = settings.kv_cache_memory_bytes // layout.block_bytes
    if num_blocks == 0:
        raise SettingsError(
            f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes} holds no block of {layout.block_bytes} bytes"
        )
    return num_blocks


def _build_model(folder: Path, config: ModelConfig, dtype: str, device: torch.device) -> Model:
    if config.architecture == FAKE_ARCHITECTURE:
        if dtype != "float32":
            raise SettingsError(f"--dtype {dtype}: the fake model counts in float32")
        return FakeModel(config, folder)
    with torch.device("meta"):
        decoder = LlamaDecoder(config, device)
    load_weights(decoder, folder, getattr(torch, dtype), device)
    return decoder
