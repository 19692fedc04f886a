"""What a request gets where it leaves its sampling open: what the model's authors recommend, else neutral values."""

from pathlib import Path
from typing import Any, Final

from coordinator.validation import check_number
from engine import requests
from engine.errors import ModelError, RequestError
from engine.json_fields import JsonFields, read_json_object
from protos.inference_pb2 import SamplingParams

FILE: Final = "generation_config.json"
NUMBERS: Final = ("temperature", "top_p", "min_p", "repetition_penalty")


def neutral_defaults() -> SamplingParams:
    """Those of the engine, which leave the model's own probabilities as they are."""
    neutral = requests.SamplingParams(max_tokens=1)
    return SamplingParams(top_k=neutral.top_k, **{name: getattr(neutral, name) for name in NUMBERS})


def read_sampling_defaults(folder: Path) -> tuple[SamplingParams, list[str]]:
    """The neutral defaults with what generation_config.json names beside them, and a sentence for each value in it
    that cannot be used. Raises ModelError when the file is broken; a folder without it has none."""
    defaults, problems = neutral_defaults(), list[str]()
    if not (folder / FILE).exists():
        return defaults, problems
    fields = read_json_object(folder / FILE)
    for name in (*NUMBERS, "top_k", "max_new_tokens", "do_sample"):
        if fields.raw(name) is None:
            continue
        try:
            defaults.MergeFrom(SamplingParams(**_read(fields, name)))
        except (ModelError, RequestError) as error:
            problems.append(str(error))
    return defaults, problems


def _read(fields: JsonFields, name: str) -> dict[str, Any]:
    """What a value of the file asks for. Raises ModelError or RequestError when it is none."""
    match name:
        case "top_k":
            return {"top_k": fields.integer(name, minimum=-1)}
        case "max_new_tokens":
            return {"max_tokens": fields.integer(name)}
        case "do_sample":  # without it, transformers takes the likeliest token, whatever else the file has
            return {} if fields.boolean(name, True) else {"temperature": 0.0}
    value = fields.number(name)
    check_number(name, value)
    return {name: value}
