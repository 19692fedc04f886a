"""What `make compose-demo` says where there is no container engine. All else of it needs one: it is a test itself."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0


def test_without_an_engine_it_says_so_in_a_sentence(tmp_path):
    command = [sys.executable, str(ROOT / "deploy" / "compose_demo")]
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("compose-demo: no container engine answers (")
    assert len(done.stderr.splitlines()) == 1
