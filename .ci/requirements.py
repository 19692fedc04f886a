"""Prints what the package requires, with these extras: `python .ci/requirements.py EXTRA...`. For pip install -r."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in extras[extra]), sep="\n")
