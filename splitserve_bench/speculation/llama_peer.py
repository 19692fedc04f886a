"""A prompt's answer by llama.cpp, with the prompt lookup of llama-cpp-python and without. Run by a Python that has
llama-cpp-python and nothing of ours: `llama_peer.py FILE.gguf`, with what to answer on stdin and figures on stdout,
both JSON (splitserve_bench/speculation/peer.py). With one thread, seconds are of its own.
"""

import json
import statistics
import sys
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]  # of nobody's extras: who compares has it
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]


def main() -> None:
    asked = json.load(sys.stdin)
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=asked["num_candidates"])
    models = [_model(sys.argv[1], asked, draft) for draft in (None, lookup)]
    rates = [[_rate(model, asked) for model in models] for _ in range(asked["repeats"])]
    plain, given = (statistics.median(each) for each in zip(*rates, strict=True))
    ratio = statistics.median(given / plain for plain, given in rates)
    print(json.dumps({"plain_tokens_per_s": plain, "tokens_per_s": given, "speedup": ratio}))


def _model(path: str, asked: dict[str, Any], draft: Any) -> Any:
    num_threads = asked["threads"]
    return llama_cpp.Llama(
        path,
        n_ctx=len(asked["prompt"]) + asked["max_tokens"] + asked["num_candidates"],
        n_threads=num_threads,
        n_threads_batch=num_threads,
        draft_model=draft,
        verbose=False,
    )


def _rate(model: Any, asked: dict[str, Any]) -> float:
    """Tokens a second after the first one, which comes of reading the prompt."""
    clock = time.process_time if asked["threads"] == 1 else time.perf_counter
    model.reset()
    temperature = asked["temperature"]
    tokens = model.generate(asked["prompt"], top_k=0, top_p=1.0, min_p=0.0, temp=temperature, repeat_penalty=1.0)
    next(tokens)
    begin_s, num_tokens = clock(), 1
    for token in tokens:
        num_tokens += 1
        if num_tokens == asked["max_tokens"] or token in asked["eos_token_ids"]:
            break
    if num_tokens == 1:
        sys.exit("the answer has one token, so that no step was timed")
    return (num_tokens - 1) / (clock() - begin_s)


if __name__ == "__main__":
    main()
