"""What the coordinator knows of the model, read from its folder."""

import logging
from pathlib import Path

from coordinator.doors.front import ServedModel
from coordinator.doors.sampling_defaults import neutral_defaults, read_sampling_defaults
from coordinator.settings import CoordinatorSettings, model_names
from coordinator.text.answer_format import UNTOLD, AnswerFormat, answer_format
from coordinator.text.structures import Structures
from coordinator.text.tokenizer import read_tokenizer
from protos import inference_pb2
from serving_core.errors import ModelError
from serving_core.model_config import read_model_config

logger = logging.getLogger(__name__)


def read_served_model(settings: CoordinatorSettings) -> ServedModel:
    """Raises ModelError or SettingsError."""
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
