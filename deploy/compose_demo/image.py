"""The image, and where no registry can be reached the base that it is built on."""

import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from command import Failed, run, say, succeeds

ROOT = Path(__file__).parents[2]
PIP_FOLDER = ROOT / "deploy" / "pip"
IMAGE = "splitserve:compose-demo"
BASE = "python:3.11-slim"
OWN_BASE = "splitserve-base:bookworm"
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"  # its python3 is 3.11
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
UNREAD = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man", "var/cache", "var/lib/apt/lists")
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PULL_S, INDEX_S, BASE_S, BUILD_S = 300.0, 10.0, 900.0, 3600.0


def build() -> str:
    """The name of an image of this checkout, with the demo model in it. Raises Failed."""
    arguments = {"BASE": base(), "TORCH_INDEX": torch_index()}
    say(f"builds {IMAGE} on {arguments['BASE']}")
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    file = ROOT / "deploy" / "Dockerfile"
    run(["docker", "build", "--network", "host", *words, "-t", IMAGE, "-f", file, ROOT], timeout_s=BUILD_S)
    num_bytes = int(run(["docker", "image", "inspect", "--format", "{{.Size}}", IMAGE]))
    say(f"the image has {num_bytes / 1e6:.0f} MB, with the demo model")
    return IMAGE


def base() -> str:
    """The usual base, here or pulled, or else one of Debian's packages."""
    if _is_here(BASE) or succeeds(["docker", "pull", "--quiet", BASE], timeout_s=PULL_S):
        return BASE
    if not _is_here(OWN_BASE):
        say(f"{BASE} cannot be pulled: makes {OWN_BASE} of Debian's packages")
        _make_base()
    return OWN_BASE


def torch_index() -> str:
    """That of torch for CPUs; empty where its wheel is in deploy/pip, put there by this machine's pip if need be."""
    if not any(PIP_FOLDER.glob("torch-*.whl")):
        try:
            urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=INDEX_S).close()
            return TORCH_INDEX
        except (urllib.error.URLError, TimeoutError):
            say(f"{TORCH_INDEX} does not answer: takes torch as this machine's pip does, into deploy/pip")
        wanted = ["--python-version", "3.11", "--only-binary=:all:", "--no-deps", "--dest", PIP_FOLDER, TORCH]
        run(["python3", "-m", "pip", "download", "--quiet", *wanted], timeout_s=BUILD_S)
    return ""


def _is_here(image: str) -> bool:
    return succeeds(["docker", "image", "inspect", image])


def _make_base() -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise Failed("without a registry the base image is made by debootstrap, as root (apt-get install debootstrap)")
    with tempfile.TemporaryDirectory(prefix="compose-demo-base-") as scratch:
        tree = Path(scratch, "tree")
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        run(["debootstrap", *options, SUITE, tree, MIRROR], timeout_s=BASE_S)
        for folder in UNREAD:
            shutil.rmtree(tree / folder, ignore_errors=True)
        (tree / "var/cache/apt/archives/partial").mkdir(parents=True)
        (tree / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        _import(tree)


def _import(tree: Path) -> None:
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    taking = ["docker", "import", "--change", f"ENV PATH={path} LANG=C.UTF-8", "-", OWN_BASE]
    with subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(taking, stdin=tar.stdout, capture_output=True, text=True, timeout=BASE_S, check=False)
    if done.returncode or tar.returncode:
        raise Failed(f"docker import has failed: {done.stderr.strip()}")
