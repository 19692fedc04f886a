"""Looks for inputs that decoders neither take nor refuse as documented, guided by what code they reach:

    python -m tests.fuzz.run [--seconds N] [--keep] [NAME...]

--keep adds what has reached new code to the corpus, which the tests replay.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

from tests.fuzz.corpus import FOLDER, MAX_INPUT_BYTES, add_to_corpus, inputs_of

NAMES: Final = sorted(path.stem for path in FOLDER.glob("*.txt"))
GRACE_S: Final = 120.0  # to start and to end
UNITS: Final = "number_of_executed_units"
MAX_INPUT_S: Final = 5  # for one input
MAX_RSS_MIB: Final = 2048


def search(name: str, folder: Path, seconds: float) -> bool:
    """Whether nothing was found in this time. What has reached new code is in the folder's `inputs` then."""
    inputs = folder / "inputs"
    inputs.mkdir()
    for number, each in enumerate(inputs_of(name)):
        (inputs / str(number)).write_bytes(each)
    limits = [f"-max_len={MAX_INPUT_BYTES}", f"-timeout={MAX_INPUT_S}", f"-rss_limit_mb={MAX_RSS_MIB}"]
    flags = [f"-max_total_time={seconds:.0f}", *limits, f"-artifact_prefix={folder}/", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tests.fuzz.child", name, str(inputs), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + GRACE_S, check=False)
    stats = [line.partition(": ")[2].strip() for line in done.stderr.splitlines() if UNITS in line]
    click.echo(f"{name}: {' '.join(stats) or '?'} inputs, {'A FAULT' if done.returncode else 'well'}")
    if done.returncode:
        click.echo("\n".join((done.stdout + done.stderr).splitlines()[-40:]))
        click.echo(f"the input is in {folder}")
    return done.returncode == 0


@click.command()
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(1), help="For each decoder.")
@click.option("--keep", "keeps", is_flag=True, help="Add what reaches new code to the corpus.")
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def main(seconds: float, keeps: bool, names: tuple[str, ...]) -> None:
    """Searches decoders, all unless some are named."""
    faulty = []
    for name in names or NAMES:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
        if not search(name, folder, seconds):
            faulty.append(name)
        elif keeps:
            add_to_corpus(name, [path.read_bytes() for path in (folder / "inputs").iterdir()])
    if faulty:
        raise SystemExit(f"faults in {', '.join(faulty)}")


if __name__ == "__main__":
    main()
