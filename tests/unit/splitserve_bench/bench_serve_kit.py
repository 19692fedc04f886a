"""Outcomes of requests, written by hand, and what `bench serve` is asked for."""

from dataclasses import fields

from splitserve_bench.serve.command import ServeOptions, serve_command
from splitserve_bench.serve.records import Outcome

PHASES = ("prefill_queue_s", "prefill_s", "kv_alloc_s", "kv_transfer_s", "decode_queue_s", "decode_s")


def answered(index=0, sent_s=0.0, arrivals_s=(0.5, 0.75, 1.0), *, tokens=None, num_tokens=None, **fields):
    """A complete answer, one token at each moment unless `tokens` says how many."""
    tokens = (1,) * len(arrivals_s) if tokens is None else tokens
    usual = {
        "scheduled_s": sent_s,
        "num_prompt_tokens": 10,
        "num_output_tokens": sum(tokens) if num_tokens is None else num_tokens,
        "ended_s": arrivals_s[-1] if arrivals_s else sent_s,
    }
    return Outcome(
        **{
            "index": index,
            "sent_s": sent_s,
            "arrivals_s": tuple(arrivals_s),
            "arrival_tokens": tokens,
            **usual,
            **fields,
        }
    )


def failed(index=0, sent_s=0.0, ended_s=1.0, error="lost", **fields):
    """A request that came to nothing; is_refused for one that was turned away."""
    return answered(index, sent_s, (), ended_s=ended_s, error=error, **fields)


def timeline(*seconds):
    """Seconds of the six phases in their order; those left out are 0."""
    return dict(zip(PHASES, (*seconds, *[0.0] * (len(PHASES) - len(seconds))), strict=True))


def serve_options(**flags):
    """The command's own defaults but for these."""
    params = serve_command.make_context("serve", []).params
    return ServeOptions(**{**{each.name: params[each.name] for each in fields(ServeOptions)}, **flags})


def staged_options(stages, request_rate=1.0, **flags):
    """Those of a load in these stages."""
    few = {"random_input_len": 8, "random_output_len": 3, "goodput": ("ttft:1",)}
    return serve_options(**{**few, "stages": stages, "request_rate": request_rate, **flags})
