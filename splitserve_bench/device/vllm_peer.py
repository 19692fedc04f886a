"""`python -m splitserve_bench.device.vllm_peer FOLDER PROMPTS BATCHES CONTEXTS FILE`: what vLLM makes of the same work,
if it is installed here, in a file that `bench engine --peer-json` reads. One JSON object.

Prompts of one size are given to it together, and no prompt twice. Before decode steps the same prompts are read once:
they are in its prefix cache then, so that all answers of a batch begin together. A step is what further tokens take
beyond the first one, divided by their number. Figures are medians, as ours are.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

from splitserve_bench.engine.command import parse_count, parse_prompts
from splitserve_bench.engine.driver import NUM_STEPS
from splitserve_bench.engine.figures import PromptSize
from splitserve_bench.engine.peers import DECODE, PREFILL, decode_key
from splitserve_bench.prompts import Prompts

REPEATS: Final = 5
MOST_STEP_TOKENS: Final = 8192


def measure_vllm(folder: Path, sizes: list[PromptSize], batches: list[int], contexts: list[int]) -> dict[str, Any]:
    """A result as engine/peers.py describes it."""
    import vllm  # type: ignore[import-not-found]  # of nobody's extras: it is here or not

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    longest = max(max(contexts) + NUM_STEPS + 1, *(size.num_tokens + 1 for size in sizes))
    started_at = time.perf_counter()
    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest,
        enable_prefix_caching=True,
        max_num_batched_tokens=max(longest, MOST_STEP_TOKENS),
        max_num_seqs=max(*batches, *(size.count for size in sizes)),
    )
    load_s = time.perf_counter() - started_at

    def answer_s(prompts: list[list[int]], num_tokens: int) -> float:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        engine.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin

    def drawn(prompts: Prompts, count: int) -> list[list[int]]:
        return [prompts.draw() for _ in range(count)]

    def prefill_s(size: PromptSize) -> float:
        prompts = Prompts(vocab_size, size.num_tokens)
        return statistics.median([answer_s(drawn(prompts, size.count), 1) for _ in range(1 + REPEATS)][1:])

    def step_s(batch: int, context: int) -> float:
        prompts = drawn(Prompts(vocab_size, context), batch)
        answer_s(prompts, 1 + NUM_STEPS)
        beyond = [answer_s(prompts, 1 + NUM_STEPS) - answer_s(prompts, 1) for _ in range(1 + REPEATS)][1:]
        return statistics.median(beyond) / NUM_STEPS

    prefill = {str(size): size.count * size.num_tokens / prefill_s(size) for size in sizes}
    shapes = [(batch, context) for context in contexts for batch in batches]
    decode = {decode_key(*shape): step_s(*shape) * 1e3 for shape in shapes}
    return {"peer": f"vllm {vllm.__version__}", "load_s": load_s, PREFILL: prefill, DECODE: decode}


def main() -> None:
    folder, prompts, batches, contexts, file = sys.argv[1:]
    sizes = list(map(parse_prompts, prompts.split(",")))
    counts = [list(map(parse_count, each.split(","))) for each in (batches, contexts)]
    result = measure_vllm(Path(folder), sizes, *counts)
    Path(file).write_text(json.dumps(result), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
