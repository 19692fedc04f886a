"""Other people's clients against a whole cluster, with the calls that their users make.

What a client asks and expects stands in a file of its own beside this one, *_calls.py or *_calls.mjs: tests for pytest
in the client's own interpreter, or for node's own runner. Here the server is started and the client installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.installing import HERE, javascript_clients, python_client
from tests.scripted_model import write_scripted_model
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

CALLS_S = 1500.0
ROOT = HERE.parent.parent
PYTEST = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=", "-o", "timeout=1200")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def scripted(start_cluster, tmp_path_factory):
    model = write_scripted_model(tmp_path_factory.mktemp("model") / "scripted")
    return start_cluster(model, http=True, node={"num_kv_blocks": 10_000})


@pytest.mark.parametrize("client", ["openai", "anthropic", "reflection"])
def test_clients_that_the_project_has(client, scripted, tmp_path):
    _make_calls([sys.executable, *PYTEST, str(HERE / f"{client}_calls.py")], scripted, tmp_path)


@pytest.mark.parametrize("client", ["litellm", "langchain", "guidellm"])
def test_clients_for_python(client, scripted, tmp_path):
    _make_calls([str(python_client(client)), *PYTEST, str(HERE / f"{client}_calls.py")], scripted, tmp_path)


@pytest.mark.parametrize("client", ["openai", "ai_sdk"])
def test_clients_for_javascript(client, scripted, tmp_path):
    node, folder = javascript_clients()
    calls = shutil.copy(HERE / f"{client}_calls.mjs", folder)
    _make_calls([str(node), "--test", str(calls)], scripted, tmp_path)


def test_lm_eval(start_cluster, tmp_path):
    python = python_client("lm_eval")
    model = write_tiny_model(tmp_path / "tiny", "llama", seed=5)
    cluster = start_cluster(model, http=True, node={"num_kv_blocks": 1000})
    _make_calls([str(python), *PYTEST, str(HERE / "lm_eval_calls.py")], cluster, tmp_path)


def _make_calls(command, cluster, folder: Path) -> None:
    """All of them succeed, and what they have left unfinished is not computed on."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
        **OFFLINE,
        "HF_HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "OPENAI_BASE_URL": f"{cluster.url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": cluster.url,
        "ANTHROPIC_API_KEY": "none",
        "GRPC_TARGET": cluster.target,
        "MODEL_FOLDER": str(cluster.model),
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    made = subprocess.run(command, cwd=ROOT, env=environment, timeout=CALLS_S, check=False, **output)
    assert made.returncode == 0, made.stdout
    cluster.wait_all_free()
