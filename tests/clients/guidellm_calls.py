"""guidellm: a benchmark of a few requests, from its command line as its users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

NUM_REQUESTS = 6
OUTPUT_TOKENS = 16
TARGET = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def test_every_request_of_a_benchmark_succeeds(tmp_path):
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={TARGET}",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['MODEL_FOLDER']}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "output": f"kind=json,path={report}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    subprocess.run([Path(sys.executable).with_name("guidellm"), "run", *flags], timeout=1200, check=True)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    told = benchmark["metrics"]["output_token_count"]["successful"]
    assert (told["min"], told["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)
