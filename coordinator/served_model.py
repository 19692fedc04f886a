"""Read the model's folder: configuration, tokenizer, output format and sampling defaults."""

import logging
from pathlib import Path
from typing import Any, Final

from coordinator.api.preprocess import ServedModel
from coordinator.api.validation import check_number
from coordinator.settings import CoordinatorSettings, model_names
from coordinator.text.answer_format import UNTOLD, AnswerFormat, answer_format
from coordinator.text.rendering import FORMS
from coordinator.text.structures import Structures
from coordinator.text.tokenizer import read_tokenizer
from protos import inference_pb2
from protos.inference_pb2 import SamplingParams
from serving_core import requests
from serving_core.errors import ModelError, RequestError, SettingsError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.model_files.config import read_model_config

logger = logging.getLogger(__name__)


def read_served_model(settings: CoordinatorSettings) -> ServedModel:
    """Read the model folder that the settings name, and return the model as it is served.

    Raises ModelError for a folder that is missing, broken or not supported, and SettingsError for settings that do not
    fit the model.
    """
    if not settings.model:
        raise ModelError("no model folder was given")
    folder = Path(settings.model)
    config = read_model_config(folder, settings.model_impl, settings.runner)
    tokenizer = read_tokenizer(
        folder,
        chat_template=settings.chat_template,
        template_kwargs_json=settings.chat_template_kwargs,
        embeds=config.embedder is not None,
    )
    answer_format = _answer_format(settings, tokenizer.template_words)
    tokenizer.keep(answer_format.tags)
    if answer_format.shows_tools:
        tokenizer.show_tools(answer_format.calls if answer_format.has_calls else UNTOLD)
    return ServedModel(
        names=model_names(settings.served_model_name) or [folder.resolve().name],
        config=config,
        tokenizer=tokenizer,
        answer_format=answer_format,
        structures=Structures(folder, config.eos_token_ids, closes_objects=settings.disable_additional_properties),
        max_model_len=settings.max_model_len or config.max_position_embeddings,
        sampling_defaults=_sampling_defaults(settings, folder),
    )


def _answer_format(settings: CoordinatorSettings, template: str) -> AnswerFormat:
    found = answer_format(settings.tool_call_parser, settings.reasoning_parser, template)
    if found.shows_tools and found.has_calls and found.calls not in FORMS:
        problem = f"--tool-call-parser {found.calls} needs a chat template that lists the tools: --chat-template FILE"
        raise SettingsError(problem)
    if (found.has_calls and not found.shows_tools) or found.thinks:
        told = "calls of tools are read as %s, thoughts %s"
        logger.info(told, found.calls, "apart from the answer" if found.thinks else "as the answer")
    return found


def _sampling_defaults(settings: CoordinatorSettings, folder: Path) -> inference_pb2.SamplingParams:
    neutral = neutral_defaults()
    if settings.generation_config == "none":
        return neutral
    defaults, problems = read_sampling_defaults(folder)
    for problem in problems:
        logger.warning("ignored in generation_config.json: %s", problem)
    if defaults != neutral:
        named = ", ".join(f"{field.name} {value:g}" for field, value in defaults.ListFields())
        logger.info("requests that do not say otherwise are sampled as the model's folder says: %s", named)
    return defaults


# Sampling defaults of requests: those that the model's authors recommend, else neutral values.

FILE: Final = "generation_config.json"
NUMBERS: Final = ("temperature", "top_p", "min_p", "repetition_penalty")


def neutral_defaults() -> SamplingParams:
    """Return sampling defaults that leave the model's probabilities unchanged."""
    neutral = requests.SamplingParams(max_tokens=1)
    return SamplingParams(top_k=neutral.top_k, **{name: getattr(neutral, name) for name in NUMBERS})


def read_sampling_defaults(folder: Path) -> tuple[SamplingParams, list[str]]:
    """Return the sampling defaults of a model folder, and a sentence for each value in it that cannot be used.

    Values of generation_config.json replace the neutral defaults; without the file, these are returned. Raises
    ModelError when the file is no JSON object.
    """
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
    """Return the sampling parameter that a value of the file sets. Raises ModelError or RequestError for an invalid
    value."""
    match name:
        case "top_k":
            return {"top_k": fields.integer(name, minimum=-1)}
        case "max_new_tokens":
            return {"max_tokens": fields.integer(name)}
        case "do_sample":  # false: transformers takes the likeliest token, whatever else the file has
            return {} if fields.boolean(name, True) else {"temperature": 0.0}
    value = fields.number(name)
    check_number(name, value)
    return {name: value}
