"""Run more tests of the packages that commits touch than the gate does: `python .ci/long_tests.py [--list] [BASE]`.

The commits are those since BASE: without it since the remote's main, or where HEAD is no newer, since the last commit
that is older than a day. TESTS names tests for each package; of these all run, nightly ones too, with the Hypothesis
profile `ci`. As many are taken as BUDGET_MINUTES allows by the minutes that MINUTES says, the first of each package
before the second of any; no clock decides. The rest is left to `make test-nightly`, and printed.
"""

import itertools
import os
import subprocess
import sys

NUM_WORKERS = 3
BUDGET_MINUTES = 15.0  # of all workers together, on two cores of an EPYC of 2022

MINUTES = {
    "tests/faults/test_matrix.py": 5.8,
    "tests/fuzz/test_corpus.py": 0.2,
    "tests/gpu/test_cuda_engine.py": 0.4,
    "tests/gpu/test_cuda_transfer.py": 0.1,
    "tests/schedules": 1.2,
    "tests/system/test_base_install.py": 0.4,
    "tests/system/test_bench_serve.py": 0.3,
    "tests/system/test_dashboards.py": 0.2,
    "tests/system/test_api_servers.py": 1.1,
    "tests/system/test_moves.py": 1.2,
    "tests/system/test_openai_api.py": 0.4,
    "tests/system/test_prefix_reuse.py": 0.3,
    "tests/system/test_resume.py": 1.2,
    "tests/system/test_same_tokens.py": 0.3,
    "tests/system/test_speculation.py": 0.4,
    "tests/system/test_start.py": 0.2,
    "tests/system/test_tensor_parallel.py": 1.2,
    "tests/system/test_tls.py": 0.5,
    "tests/system/test_ui.py": 1.0,
    "tests/unit/coordinator": 3.6,
    "tests/unit/decode_node": 0.1,
    "tests/unit/deploy": 0.3,
    "tests/unit/engine/test_transformers_backend.py": 0.4,
    "tests/unit/engine/test_transformers_backend_ranks.py": 1.8,
    "tests/unit/engine/test_invariant.py": 0.8,
    "tests/unit/engine/test_native_decode.py": 1.9,
    "tests/unit/engine/test_tensor_parallel.py": 0.9,
    "tests/unit/kv_transfer": 3.5,
    "tests/unit/prefill_node": 0.1,
    "tests/unit/serving_core": 0.8,
    "tests/unit/serving_node": 6.4,
    "tests/unit/splitserve/test_launcher.py": 1.6,
    "tests/unit/splitserve/test_signals.py": 0.1,
    "tests/unit/splitserve_bench/test_doctor.py": 0.6,
    "tests/unit/splitserve_bench/test_load.py": 0.5,
    "tests/unit/splitserve_bench/test_serve_stages.py": 0.4,
    "tests/unit/splitserve_bench/test_simulate_fleets.py": 2.3,
    "tests/unit/splitserve_vllm": 0.2,
}
TESTS = {  # the most telling first
    "coordinator": [
        "tests/schedules",
        "tests/unit/coordinator",
        "tests/system/test_resume.py",
        "tests/system/test_api_servers.py",
        "tests/system/test_ui.py",
    ],
    "decode_node": [
        "tests/unit/decode_node",
        "tests/schedules",
        "tests/system/test_speculation.py",
        "tests/system/test_moves.py",
    ],
    "deploy": ["tests/unit/deploy", "tests/system/test_dashboards.py"],
    "engine": [
        "tests/unit/engine/test_transformers_backend.py",
        "tests/gpu/test_cuda_engine.py",
        "tests/gpu/test_cuda_transfer.py",
        "tests/unit/engine/test_invariant.py",
        "tests/unit/engine/test_tensor_parallel.py",
        "tests/unit/engine/test_native_decode.py",
        "tests/unit/engine/test_transformers_backend_ranks.py",
        "tests/system/test_same_tokens.py",
    ],
    "kv_transfer": ["tests/unit/kv_transfer", "tests/system/test_moves.py", "tests/faults/test_matrix.py"],
    "prefill_node": ["tests/unit/prefill_node", "tests/schedules", "tests/system/test_prefix_reuse.py"],
    "protos": ["tests/system/test_openai_api.py"],
    "serving_core": ["tests/unit/serving_core", "tests/fuzz/test_corpus.py", "tests/system/test_tls.py"],
    "serving_node": [
        "tests/schedules",
        "tests/system/test_tensor_parallel.py",
        "tests/unit/serving_node",
        "tests/faults/test_matrix.py",
    ],
    "splitserve": [
        "tests/unit/splitserve/test_launcher.py",
        "tests/unit/splitserve/test_signals.py",
        "tests/system/test_start.py",
        "tests/system/test_base_install.py",
    ],
    "splitserve_bench": [
        "tests/unit/splitserve_bench/test_load.py",
        "tests/unit/splitserve_bench/test_serve_stages.py",
        "tests/unit/splitserve_bench/test_doctor.py",
        "tests/unit/splitserve_bench/test_simulate_fleets.py",
        "tests/system/test_bench_serve.py",
    ],
    "splitserve_vllm": ["tests/unit/splitserve_vllm"],
}
SIMULATED_DEVICE = "tests/gpu"  # tests of this folder run on the simulated CUDA device


def base_of_head() -> str:
    """Return the commit since which HEAD's own commits are."""
    (head,) = _git("rev-parse", "HEAD")
    if remote := _git("for-each-ref", "--format=%(objectname)", "refs/remotes/origin/main"):
        (base,) = _git("merge-base", head, *remote)
        if base != head:
            return base
    (committed_at,) = _git("show", "--no-patch", "--format=%ct", head)
    older = _git("rev-list", "--max-count=1", f"--before={int(committed_at) - 24 * 3600}", head)
    return older[0] if older else _git("rev-list", "--max-parents=0", head)[-1]


def is_touched(package: str, files: list[str]) -> bool:
    """Return whether one of the files is of a package or of its own tests."""
    return any(file.startswith((f"{package}/", f"tests/{package}/", f"tests/unit/{package}/")) for file in files)


def choose(files: list[str], budget_minutes: float = BUDGET_MINUTES) -> tuple[list[str], list[str]]:
    """Return the tests to run for these files, and those that are left."""
    turns = itertools.zip_longest(*(tests for package, tests in TESTS.items() if is_touched(package, files)))
    chosen, left = [], []
    for test in dict.fromkeys(filter(None, itertools.chain(*turns))):
        fits = MINUTES[test] <= budget_minutes
        budget_minutes -= MINUTES[test] if fits else 0.0
        (chosen if fits else left).append(test)
    return chosen, left


def run(tests: list[str], *flags: str) -> bool:
    """Return whether these tests passed, of which there may be none."""
    options = f"-q -n {NUM_WORKERS} --dist loadfile --no-loadscope-reorder --durations=15 --hypothesis-profile=ci"
    command = [sys.executable, "-m", "pytest", *options.split(), *flags, *tests]
    return not tests or subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def main(arguments: list[str]) -> int:
    only_lists, bases = "--list" in arguments, [each for each in arguments if each != "--list"]
    base = bases[0] if bases else base_of_head()
    chosen, left = choose(_git("diff", "--name-only", base, "HEAD"))
    print(f"since {base}: {' '.join(chosen) or 'no more tests'}")
    print(f"left to the nightly: {' '.join(left) or 'none of these packages'}", flush=True)
    if only_lists:
        return 0
    on_device = [test for test in chosen if test.startswith(SIMULATED_DEVICE)]
    passed = run([test for test in chosen if test not in on_device])
    return 0 if run(on_device, "--simulate-cuda") and passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
