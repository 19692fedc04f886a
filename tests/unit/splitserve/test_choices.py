"""The three lines with which `splitserve up` says what it has chosen, and why."""

import pytest

from splitserve.launch.choices import choices
from splitserve.launch.cluster import ClusterSettings, Place, num_nodes, plan_cluster
from splitserve.launch.models import LocalModel
from tests.tiny_models import write_fake_model, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype="bfloat16")


def chosen(folder, num_cpus=2, *, settings=None, **passed):
    settings = settings or ClusterSettings(prefill=1, decode=1)
    place = Place(4000, "", "secret", "id", tuple(range(num_cpus)))
    processes = plan_cluster(settings, {"device": "cpu", **passed}, LocalModel(folder, "tiny"), place)
    return choices(processes, num_nodes(settings), num_cpus)


def test_defaults_are_explained(model):
    about_model, about_nodes, about_memory = chosen(model)
    assert "LlamaForCausalLM by SplitServe's own code (it supports the architecture)" in about_model
    assert "in bfloat16 as config.json says" in about_model
    assert about_nodes.startswith("Nodes: 1 prefill, 1 decode on 2 CPUs, divided evenly among 2 ranks")
    assert "through shared memory" in about_nodes
    assert "`splitserve doctor` simulates whether one large node keeps more" in about_nodes
    assert "a KV pool of 512.0 MiB (the default on CPUs" in about_memory


def test_what_was_given_is_named(model):
    about_model, about_nodes, about_memory = chosen(
        model, dtype="float32", model_impl="native", max_model_len=64, num_kv_blocks=10, kv_shared_memory=False
    )
    assert "(--model-impl native), in --dtype float32, with a context of --max-model-len 64 tokens" in about_model
    assert "KV goes by --kv-transport zmq" in about_nodes
    assert "(as given), which has room for 160 tokens" in about_memory


def test_ranks_that_share_cpus(model):
    _, about_nodes, _ = chosen(model, 2, settings=ClusterSettings(prefill=1, decode=1, decode_tp=2))
    assert "sharing 2 CPUs among 3 ranks" in about_nodes


def test_on_ray_and_on_cuda(model):
    assert "on the hosts that Ray chooses" in (about_nodes := chosen(model, 0)[1])
    assert "doctor" not in about_nodes
    one = ClusterSettings(prefill=0, decode=0, mixed=1)
    assert "doctor" not in chosen(model, settings=one)[1]
    _, about_nodes, about_memory = chosen(model, device="cuda")
    assert "on CUDA devices" in about_nodes
    assert "KV in what --gpu-memory-utilization 0.9 leaves" in about_memory


def test_a_model_without_weights(tmp_path):
    assert "each node holds 0 B of weights" in chosen(write_fake_model(tmp_path / "fake"))[2]
