"""A model folder, and what a search is asked for."""

import json

from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve_bench.plan.candidates import Plan, PlanOptions, Pool
from splitserve_bench.plan.loads import LoadOptions
from splitserve_bench.plan.nodes import NodeOptions, machines_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def model_folder(path, config=LLAMA):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def asked_nodes(**values):
    fields = {
        "model": "", "profiles": (), "prefill_hardware": ("h100",), "decode_hardware": ("h100",),
        "both_hardware": ("h100",), "link": "", "host_link": "ib", "gpus_per_host": 4, "tp_sizes": (1, 2),
        "device_memory_bytes": 0, "max_model_len": 0, "max_num_batched_tokens": 512, "max_num_seqs": 32,
    }  # fmt: skip
    return NodeOptions(**{**fields, **values})


def asked(nodes, **values):
    load = LoadOptions("random", "", 1.0, 200, 8, 0.0, 1.0, 0)
    fields = {
        "gpus": 2, "cells": 1, "objective": "device", "candidates": 4, "goodput": ("ttft:200 tpot:20",),
        "attainment": 0.9, "tolerance": 0.2, "max_probes": 4, "num_prompts": 40, "seconds": 0.1, "all_plans": False,
    }  # fmt: skip
    return PlanOptions(nodes=nodes, **{"load": load, **fields, **values})


def paper_nodes(tmp_path):
    return asked_nodes(
        profiles=(str(tmp_path / "profile.json"),), prefill_hardware=(), decode_hardware=(), both_hardware=()
    )


def plan_of(nodes, *counts, devices=8):
    """Counts of readers, writers and others of TP 1; TP 2 for negative ones."""
    kinds = machines_of(nodes).kinds
    pools = [
        Pool(role, kinds[count < 0], abs(count))
        for role, count in zip((PREFILL, DECODE, MIXED), counts, strict=False)
        if count
    ]
    return Plan(tuple(pools), devices, nodes.gpus_per_host)
