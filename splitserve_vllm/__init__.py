"""Run vLLM as the engine of a node: our coordinator, our KV transfer, vLLM's scheduler, models and kernels."""
