"""What steps read of the weights of our own decoders."""

from engine.engine import Engine
from engine.model.experts import MixtureOfExperts
from engine.model.llama import LlamaDecoder


def read_weight_bytes(engine: Engine, num_tokens: int) -> int:
    """Bytes of the weights that a step of so many tokens reads: all but the embedding's vectors, unless they are the
    head too, and of experts the share that is taken on average."""
    decoder = engine.model
    assert isinstance(decoder, LlamaDecoder)
    embedding = decoder.embed_tokens
    assert embedding is not None
    vector_bytes = sum(parameter.nbytes for parameter in embedding.parameters(recurse=False))
    is_head = decoder.lm_head is None and embedding.num_bytes == vector_bytes  # else the head has a copy of its own
    mixtures = (module for module in decoder.modules() if isinstance(module, MixtureOfExperts))
    expert_bytes = sum(mixture.expert_bytes for mixture in mixtures)
    experts = engine.config.experts
    unread_bytes = 0 if experts is None else round((1 - experts.share_taken(num_tokens)) * expert_bytes)
    return engine.weight_bytes - (0 if is_head else vector_bytes) - unread_bytes
