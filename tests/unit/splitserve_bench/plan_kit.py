"""Small tables, written by hand in the form of published ones; a model folder; and what a search is asked for."""

import json

from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve_bench.plan.asked import Asked, AskedLoad, AskedNodes
from splitserve_bench.plan.nodes import machines_of
from splitserve_bench.plan.plans import Plan, Pool

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
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 5120,
    "ffn_dim": 20480,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}


def model_folder(path, config=LLAMA):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def coefficients(base=10.0, each=0.1, squared=1e-5, step=8.0):
    """Of DistServe's form, for one size; a step of answers from 96 on is 2 ms shorter than the other form would say."""
    return {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [base, each, squared],
        "decoding_smallbs": [step, 1e-4, 0.05],
        "decoding_largebs": [step - 2.0, 1e-4, 0.05],
    }


def distserve_file(path, models=None):
    path.write_text(json.dumps(models or {"a/model": {"1": coefficients(), "2": coefficients(6.0, 0.05, 5e-6, 5.0)}}))
    return path


SPLITWISE_COLUMNS = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time,e2e_time,"
    "tensor_parallel"
)


def splitwise_file(path, rows=None, columns=SPLITWISE_COLUMNS):
    """Prompts of 50 ms + 0.1 ms a token; a step of n answers is 20 + n ms, and 1 µs longer for each token before."""
    if rows is None:
        rows = [
            f"m,{hardware},{tokens},{batch},128,1.0,0.7,{50 + 0.1 * tokens * batch},"
            f"{20 + batch + 0.001 * batch * (tokens + 64)},900,{tp}"
            for hardware, tp in (("h100-80gb", 1), ("a100-80gb", 1), ("h100-80gb", 2))
            for tokens, batch in ((128, 1), (512, 1), (512, 2), (512, 4), (512, 8), (1024, 1), (2048, 1))
            for _ in range(3)
        ]
    path.write_text("\n".join([columns, *rows]) + "\n")
    return path


LAYER_PARTS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


def llmservingsim_folder(path, beside=2):
    """Every part of a layer takes 10 µs and 0.1 µs a token; attention of a chunk 0.2 µs a token and 0.001 µs a token
    before it, of an answer 1 µs and 0.01 µs a token before it, so many times that beside a chunk."""
    folder = path / "RTX" / "a" / "model" / "bf16" / "tp1"
    folder.mkdir(parents=True)
    parts = (*LAYER_PARTS, "embedding", "final_layernorm")
    dense = [f"{part},{tokens},{10 + 0.1 * tokens}" for part in parts for tokens in (1, 128, 512, 2048)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]) + "\n")
    heads = [f"{part},{num},{100 + num}" for part in ("lm_head", "sampler") for num in (1, 16, 256)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]) + "\n")
    chunk_us = {(chunk, before): 0.2 * chunk + 0.001 * before for chunk in (16, 512, 2048) for before in (0, 512, 4096)}
    answer_us = {(num, each): num + 0.01 * each * num for num in (1, 16, 256) for each in (16, 1024, 4096)}
    rows = [f"{chunk},{before},0,0,{us}" for (chunk, before), us in chunk_us.items()]
    rows += [f"0,0,{num},{each},{us}" for (num, each), us in answer_us.items()]
    rows += [
        f"{chunk},{before},{num},{each},{us + beside * more_us}"
        for (chunk, before), us in chunk_us.items()
        for (num, each), more_us in answer_us.items()
    ]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *rows]) + "\n")
    return folder.parent


def asked_nodes(**values):
    fields = {
        "model": "", "profile": "", "table_model": "", "prefill_hardware": ("h100",), "decode_hardware": ("h100",),
        "both_hardware": ("h100",), "link": "", "host_link": "ib", "gpus_per_host": 4, "tp_sizes": (1, 2),
        "device_memory_bytes": 0, "max_model_len": 0, "max_num_batched_tokens": 512, "max_num_seqs": 32,
    }  # fmt: skip
    return AskedNodes(**{**fields, **values})


def asked(nodes, **values):
    load = AskedLoad("random", "", 1.0, 200, 8, 0.0, 1.0, 0)
    fields = {
        "gpus": 2, "cells": 1, "objective": "device", "candidates": 4, "goodput": ("ttft:200 tpot:20",),
        "attainment": 0.9, "tolerance": 0.2, "max_probes": 4, "num_prompts": 40, "seconds": 0.1, "all_plans": False,
    }  # fmt: skip
    return Asked(nodes=nodes, **{"load": load, **fields, **values})


def paper_nodes(tmp_path):
    return asked_nodes(
        profile=str(tmp_path / "profile.json"), prefill_hardware=(), decode_hardware=(), both_hardware=()
    )


def plan_of(nodes, *counts, devices=8):
    """Counts of readers, writers and others of TP 1; TP 2 for negative ones."""
    kinds = machines_of(nodes).kinds
    pools = [
        Pool(role, kinds[count < 0], abs(count))
        for role, count in zip((PREFILL, DECODE, BOTH), counts, strict=False)
        if count
    ]
    return Plan(tuple(pools), devices, nodes.gpus_per_host)
