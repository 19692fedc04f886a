"""What a client hears of a request at which every node's step fails."""

import grpc
import torch
from safetensors.torch import load_file, save_file

from tests.system.answers import ask, reason, refusal, request
from tests.tiny_models import write_tiny_llama

POISON = ord("x")


def write_poisoned(folder):
    """A model whose embedding of one token is not finite."""
    write_tiny_llama(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISON] = torch.inf
    save_file(weights, file, metadata={"format": "pt"})
    return folder


async def test_the_client_hears_why_its_request_failed_and_other_requests_go_on(start_cluster, tmp_path):
    cluster = start_cluster(write_poisoned(tmp_path / "model"))
    async with cluster.connect() as stub:
        error = await refusal(stub, request([1, POISON, 2], max_tokens=4))
        assert (error.code(), reason(error)) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
        assert error.details() == (
            "nodes were lost or failed 2 times in a row while they computed the request, and it is not tried again: "
            "the model's logits are not finite numbers"
        )
        answer = await ask(stub, [1, 2, 3], max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
