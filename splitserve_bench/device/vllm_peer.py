"""`python -m splitserve_bench.device.vllm_peer FOLDER PROMPTS BATCHES CONTEXTS FILE`: what vLLM makes of the same work,
if it is installed here, in a file that `bench engine --peer-json` reads. One JSON object.

Prompts of one size are given to it together. A decode step is what further tokens of a batch take, divided by their
number.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from splitserve_bench.engine.command import parse_count, parse_prompts
from splitserve_bench.engine.figures import PromptSize
from splitserve_bench.engine.peers import DECODE, PREFILL, decode_key
from splitserve_bench.prompts import Prompts

NUM_STEPS: Final = 32  # after the first token
REPEATS: Final = 3
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
        enable_prefix_caching=False,
        max_num_batched_tokens=max(longest, MOST_STEP_TOKENS),
        max_num_seqs=max(*batches, *(size.count for size in sizes)),
    )
    load_s = time.perf_counter() - started_at

    def least_s(size: PromptSize, num_tokens: int) -> float:
        """Of several repeats, after one that does not count."""
        sampling = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        prompts = Prompts(vocab_size, size.num_tokens)
        seconds = []
        for _ in range(1 + REPEATS):
            drawn = [{"prompt_token_ids": prompts.draw()} for _ in range(size.count)]
            begin = time.perf_counter()
            engine.generate(drawn, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
        return min(seconds[1:])

    prefill = {str(size): size.count * size.num_tokens / least_s(size, 1) for size in sizes}
    decode = {}
    for batch, context in ((batch, context) for context in contexts for batch in batches):
        size = PromptSize(batch, context)
        step_s = (least_s(size, 1 + NUM_STEPS) - least_s(size, 1)) / NUM_STEPS
        decode[decode_key(batch, context)] = step_s * 1e3
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
