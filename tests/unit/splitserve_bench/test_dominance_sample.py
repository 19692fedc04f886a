"""A sample of the grid of docs/goodput.md: the measured node, and traces like those of a chat and a code assistant."""

from pathlib import Path

import pytest

from tests.unit.splitserve_bench.dominance_kit import dominance, figures_of, write_trace

PROFILE = Path(__file__).with_name("amx_core.json")  # of SmolLM2-135M-Instruct in bfloat16 on a core with AMX


@pytest.mark.long
def test_auto_is_no_worse_than_the_best_of_all_others(tmp_path):
    """Its mean is no worse, and no cell is far behind. What few seeds leave to chance is in the margin: the document
    has the grid of many."""
    chat = write_trace(tmp_path / "chat.csv", 600, prompt_tokens=250, answer_tokens=50)
    code = write_trace(tmp_path / "code.csv", 600, prompt_tokens=400, answer_tokens=6, seed=1)
    traces = ("--trace", f"chat={chat}", "--trace", f"code={code}", "--rates", "chat=1,3,6", "--rates", "code=0.5,1.5")
    result = dominance("--profile", PROFILE, *traces, "--seeds", "3", "--num-prompts", "100", "--json")
    found = figures_of(result)
    told = [(cell["trace"], cell["rate"], cell["limits"], cell["difference"]) for cell in found["cells"]]
    assert found["mean_difference"] >= 0, told
    assert found["cells"][found["worst"]]["difference"] >= -0.05, told
