"""List every request field of OpenAI and vLLM, and the structured-output fields of SGLang and llama.cpp, with its
handling.

The HTTP API decides by this list, and docs/fields.md is generated from it (`python -m tests.field_table`).

An unsupported field that would change the output is refused by name; a field that cannot change it is accepted. A field
that is not listed is unknown: the client gets a warning or an error (coordinator/api/unknown_fields.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from coordinator.api.http.fields import Fields, shown

COMPLETIONS, CHAT, BATCH, TOKENIZE, DETOKENIZE = "completions", "chat", "batch", "tokenize", "detokenize"
RESPONSES, MESSAGES, EMBEDDINGS = "responses", "messages", "embeddings"
ENDPOINTS: Final = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    BATCH: "/v1/chat/completions/batch",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
    EMBEDDINGS: "/v1/embeddings",
    TOKENIZE: "/tokenize",
    DETOKENIZE: "/detokenize",
}
CHATS: Final = (CHAT, BATCH)
ANSWERS: Final = (COMPLETIONS, *CHATS)
OTHERS: Final = (RESPONSES, MESSAGES)  # translated to chat completions
ALL: Final = (*ANSWERS, *OTHERS)


class Fate(Enum):
    """Handling of a field."""

    TAKEN = "taken"  # read by the endpoint's parser
    IDLE = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KnownField:
    """A field of some endpoints.

    `about` is a sentence without its full stop; for an idle or refused field it gives the reason. `harmless` are values
    of a refused field that are accepted because they change nothing; so is a value equal to the field `same_as`.
    """

    name: str
    endpoints: tuple[str, ...]
    fate: Fate
    about: str = ""
    harmless: tuple[Any, ...] = ()
    same_as: str = ""


def settle(fields: Fields, endpoint: str) -> None:
    """Read the endpoint's idle and refused fields. Raises RequestError for a refused field with an effective value."""
    for known in _SETTLED[endpoint]:
        value = fields.raw(known.name)
        if known.fate is Fate.REFUSED and value is not None and not _asks_for_nothing(known, value, fields):
            raise fields.problem(known.name, f"({shown(value)}) is not supported: {known.about}")


def _asks_for_nothing(known: KnownField, value: Any, fields: Fields) -> bool:
    others = (fields.raw(known.same_as),) if known.same_as else ()
    # True == 1 in Python, but not in JSON.
    return any(type(value) is type(each) and value == each for each in (*known.harmless, *others))


def _taken(endpoints: tuple[str, ...], names: str) -> Iterator[KnownField]:
    """Yield fields whose names need no explanation."""
    return (KnownField(name, endpoints, Fate.TAKEN) for name in names.split())


def _told(endpoints: tuple[str, ...], name: str, about: str) -> KnownField:
    return KnownField(name, endpoints, Fate.TAKEN, about)


def _idle(endpoints: tuple[str, ...], names: str, about: str) -> Iterator[KnownField]:
    return (KnownField(name, endpoints, Fate.IDLE, about) for name in names.split())


def _refused(
    endpoints: tuple[str, ...], names: str, about: str, *harmless: Any, same_as: str = ""
) -> Iterator[KnownField]:
    return (KnownField(name, endpoints, Fate.REFUSED, about, harmless, same_as) for name in names.split())


_WHOLE_VOCABULARY: Final = "-1: those of the whole vocabulary, if --max-logprobs lets so many be told"
_KEEP_ALL: Final = {"type": "clear_thinking_20251015", "keep": "all"}  # clears nothing

KNOWN: Final[tuple[KnownField, ...]] = (
    # ---- taken ----
    *_taken(ALL, "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty seed"),
    *_taken(ALL, "stop_token_ids ignore_eos min_tokens skip_special_tokens"),
    *_taken((*ANSWERS, RESPONSES), "stop"),
    *_taken(ANSWERS, "response_format include_timeline"),
    *_taken(ALL, "include_stop_str_in_output logit_bias structured_outputs cache_salt ttft_ms tpot_ms slo_class"),
    _told(ALL, "priority", "from -100 to 100, the lower the earlier"),
    *_taken((*ALL, EMBEDDINGS, TOKENIZE, DETOKENIZE), "model"),
    _told((EMBEDDINGS,), "input", "text, token ids, or a list of either"),
    _told((EMBEDDINGS,), "encoding_format", "float or base64"),
    _told((EMBEDDINGS,), "dimensions", "of a model whose config.json has is_matryoshka or matryoshka_dimensions"),
    _told((EMBEDDINGS,), "normalize", "to length 1; as the model's folder says where it is missing"),
    _told((EMBEDDINGS,), "truncate_prompt_tokens", "the first tokens are kept; -1: as many as there is room for"),
    _told((EMBEDDINGS,), "priority", "from -100 to 100, the lower the earlier"),
    _told((EMBEDDINGS,), "request_id", "where there is no header X-Request-Id"),
    *_taken((EMBEDDINGS,), "cache_salt"),
    _told((COMPLETIONS,), "max_tokens", "16 where it is missing, as OpenAI's, or what the prompt leaves room for"),
    *_taken(CHATS, "max_tokens max_completion_tokens"),
    _told((COMPLETIONS,), "logprobs", f"how many of the likeliest tokens are told; {_WHOLE_VOCABULARY}"),
    *_taken(CHATS, "logprobs"),
    _told(CHATS, "top_logprobs", _WHOLE_VOCABULARY),
    _told(ANSWERS, "bad_words", "as the tokenizer splits them, at a beginning and behind a space, as in vLLM"),
    _told(ANSWERS, "logprob_token_ids", "needs logprobs, which are then of these tokens, not of the likeliest"),
    _told(ANSWERS, "allowed_token_ids", "no other token comes, an end token neither; logprobs are those of all tokens"),
    _told(ANSWERS, "truncate_prompt_tokens", "so many of the prompt's tokens are kept; -1: as there is room for"),
    _told(ANSWERS, "truncation_side", "left, where it is missing too, keeps the last tokens, right the first"),
    _told(ANSWERS, "return_tokens_as_token_ids", "tokens are `token_id:7` in logprobs"),
    _told(ANSWERS, "return_token_ids", "in a batch, those of the answers alone"),
    _told(ALL, "request_id", "where there is no header X-Request-Id"),
    *_taken((COMPLETIONS, CHAT), "n"),
    *_taken((COMPLETIONS, CHAT, *OTHERS), "stream"),
    _told((COMPLETIONS, CHAT), "stream_options", "needs `stream`; continuous_usage_stats needs include_usage"),
    _told((COMPLETIONS, CHAT), "prompt_logprobs", "not in a stream; the k likeliest tokens alone have a rank"),
    _told((COMPLETIONS,), "prompt", "text, token ids, or a list of either"),
    *_taken((COMPLETIONS,), "echo"),
    _told(CHATS, "echo", "the answer begins with the last message, if that is the assistant's, as in vLLM"),
    *_taken((CHAT, MESSAGES), "messages"),
    _told((BATCH,), "messages", "a list of conversations; the choices are their answers, in their order"),
    *_taken((CHAT, RESPONSES), "tools tool_choice parallel_tool_calls"),
    *_taken((MESSAGES,), "tools tool_choice max_tokens stop_sequences system"),
    _told((MESSAGES,), "thinking", "enable_thinking of the chat template; budget_tokens is a target"),
    _told((MESSAGES,), "output_config", "format, and effort as reasoning_effort of a chat"),
    *_taken((RESPONSES,), "input instructions max_output_tokens"),
    _told((RESPONSES,), "text", "format; verbosity is refused unless medium"),
    _told((RESPONSES,), "reasoning", "effort as reasoning_effort of a chat; thoughts come as they are"),
    _told((RESPONSES,), "metadata", "the response repeats it"),
    _told((RESPONSES,), "include", "message.output_text.logprobs; of what else OpenAI has here a response has nothing"),
    _told((RESPONSES,), "top_logprobs", "needs message.output_text.logprobs in include; of the text alone"),
    _told((*CHATS, TOKENIZE), "reasoning_effort", "for the chat template, with enable_thinking: false for none"),
    _told((*CHATS, *OTHERS), "include_reasoning", "false leaves thoughts out of the response"),
    *_taken((*CHATS, TOKENIZE), "add_generation_prompt continue_final_message"),
    *_taken((*CHATS, *OTHERS, TOKENIZE), "chat_template_kwargs"),
    *_taken((TOKENIZE,), "prompt messages tools return_token_strs"),
    _told((TOKENIZE,), "add_special_tokens", "of a prompt; true is refused for messages"),
    *_taken((DETOKENIZE,), "tokens"),
    # ---- idle ----
    *_idle((*ANSWERS, RESPONSES), "user safety_identifier", "who asks makes no difference"),
    *_idle((MESSAGES,), "user_profile_id workspace_id", "who asks makes no difference"),
    *_idle((RESPONSES,), "access_programs", "there are none"),
    *_idle((RESPONSES,), "image", "messages are text"),
    *_idle((MESSAGES,), "diagnostics", "the answer is all that is told"),
    *_idle((*ANSWERS, MESSAGES), "metadata", "it is for the client's own use"),
    *_idle(ANSWERS, "store", "no answer is kept"),
    *_idle(ALL, "service_tier", "there is one"),
    *_idle((MESSAGES,), "speed", "there is one"),
    *_idle(
        (*ANSWERS, RESPONSES),
        "prompt_cache_key prompt_cache_options prompt_cache_retention",
        "common beginnings are cached",
    ),
    *_idle((MESSAGES,), "cache_control", "common beginnings are cached"),
    *_idle((RESPONSES,), "max_tool_calls", "it is of built-in tools"),
    *_idle((RESPONSES,), "stream_options", "events bear no padding"),
    *_idle((*ANSWERS, RESPONSES), "session_id", "common beginnings are cached"),
    *_idle(ANSWERS, "length_penalty early_stopping", "beam search alone has a use for it"),
    *_idle(ANSWERS, "spaces_between_special_tokens", "there are none"),
    *_idle(ANSWERS, "stream_interval", "an event brings what has come until then"),
    *_idle(ANSWERS, "guided_decoding_backend", "there is one"),
    *_idle(ANSWERS, "return_token_offsets return_mm_kwargs", "rendering alone has a use for it, in vLLM too"),
    *_idle(ANSWERS, "routed_experts_prompt_start", "no routing of experts is told"),
    *_idle(CHATS, "prediction", "it would only make the answer faster"),
    *_idle((*CHATS, RESPONSES, TOKENIZE), "media_io_kwargs mm_processor_kwargs", "messages are text"),
    *_idle((EMBEDDINGS,), "user safety_identifier additional_data", "who asks, and what for, makes no difference"),
    *_idle((EMBEDDINGS,), "service_tier", "there is one"),
    *_idle((EMBEDDINGS,), "mm_processor_kwargs media_io_kwargs", "inputs are text"),
    *_idle(
        (EMBEDDINGS,),
        "add_generation_prompt continue_final_message chat_template chat_template_kwargs",
        "messages alone have a use for it",
    ),
    # ---- refused ----
    *_refused((EMBEDDINGS,), "add_special_tokens", "send token ids, which /tokenize makes without them", True),
    *_refused((EMBEDDINGS,), "embed_dtype", "vectors are float32", "float32"),
    *_refused((EMBEDDINGS,), "endianness", "vectors are little-endian, as OpenAI's", "native", "little"),
    *_refused((EMBEDDINGS,), "messages", "send input: /tokenize makes token ids of a conversation", []),
    *_refused((EMBEDDINGS,), "truncation_side", "the first tokens are those that are kept", "right"),
    *_refused((EMBEDDINGS,), "use_activation", "it is normalize"),
    *_refused(ANSWERS, "best_of", "as many answers are made as n asks for", 1, same_as="n"),
    *_refused(ALL, "ec_transfer_params kv_transfer_params", "the server decides what goes between its nodes", {}),
    *_refused(ANSWERS, "guided_choice", "it is choice of structured_outputs"),
    *_refused(ANSWERS, "guided_grammar", "it is grammar of structured_outputs"),
    *_refused(ANSWERS, "guided_json", "it is json of structured_outputs"),
    *_refused(ANSWERS, "guided_regex", "it is regex of structured_outputs"),
    *_refused(ANSWERS, "ebnf grammar", "it is grammar of structured_outputs", ""),
    *_refused(ANSWERS, "json_schema", "it is json of structured_outputs"),
    *_refused(ANSWERS, "regex", "it is regex of structured_outputs", ""),
    *_refused(ANSWERS, "guided_whitespace_pattern", "it is whitespace_pattern of structured_outputs"),
    *_refused(ANSWERS, "logits_processors", "no code of clients is run", []),
    *_refused(ALL, "num_beams beam_width", "there is no beam search, answers are sampled or greedy", 1),
    *_refused(ANSWERS, "prompt_embeds", "a prompt is text or tokens"),
    *_refused(ANSWERS, "repetition_detection", "penalties keep an answer from repeating itself", {}),
    *_refused(ANSWERS, "suffix", "an answer fills no gap", ""),
    *_refused(ANSWERS, "thinking_token_budget", "thoughts and answer share max_tokens", -1),
    *_refused(ALL, "use_beam_search", "there is no beam search, answers are sampled or greedy", False),
    *_refused(ALL, "vllm_xargs", "there is no extension that would take it", {}),
    *_refused(ANSWERS, "watermarking", "answers bear no mark", False),
    *_refused((COMPLETIONS,), "add_special_tokens", "send token ids, which /tokenize makes without them", True),
    *_refused(CHATS, "add_special_tokens", "the chat template writes them", False),
    *_refused(CHATS, "audio web_search_options", "answers are text, by the model alone"),
    *_refused(CHATS, "function_call", "it is tool_choice", "none", "auto"),
    *_refused(CHATS, "functions", "they are tools", []),
    *_refused(CHATS, "modalities", "answers are text", ["text"]),
    *_refused((*CHATS, RESPONSES), "moderation", "nothing is moderated"),
    *_refused((RESPONSES,), "background", "an answer comes while its client waits", False),
    *_refused((RESPONSES,), "context_management", "send what the model is to read", []),
    *_refused((RESPONSES,), "conversation previous_response_id", "nothing is kept: send the whole conversation"),
    *_refused((RESPONSES,), "prompt", "no prompts are kept"),
    *_refused((RESPONSES,), "store", "no answer is kept", False),
    *_refused((RESPONSES,), "enable_response_messages", "the response has its output, and no messages", False),
    *_refused((RESPONSES,), "previous_input_messages", "send them in input", []),
    *_refused((RESPONSES,), "previous_response", "send its output in input"),
    *_refused((RESPONSES,), "truncation", "send what there is room for", "disabled"),
    *_refused((MESSAGES,), "container mcp_servers", "tools are the client's own", []),
    *_refused((MESSAGES,), "inference_geo", "the server does not know where it is"),
    *_refused(
        (MESSAGES,), "context_management", "send what the model is to read", {}, {"edits": []}, {"edits": [_KEEP_ALL]}
    ),
    *_refused((MESSAGES,), "output_format", "it is format of output_config"),
    *_refused(CHATS, "return_prompt_text", "return_token_ids tells the prompt's tokens, /detokenize their text", False),
    *_refused(CHATS, "verbosity", "say it in a message", "medium"),
    *_refused((*CHATS, TOKENIZE), "chat_template", "templates are the operator's (--chat-template)"),
    *_refused((*CHATS, TOKENIZE), "documents", "chat_template_kwargs hands them to a template that knows them", []),
    *_refused((BATCH,), "parallel_tool_calls", "a batch has no tools", True, False),
    *_refused((BATCH,), "n", "each conversation has one answer", 1),
    *_refused((BATCH,), "prompt_logprobs", "they are told of one conversation alone"),
    *_refused((BATCH,), "stream", "the answers to a batch come together", False),
    *_refused((BATCH,), "stream_options", "the answers to a batch come together"),
    *_refused((BATCH,), "tool_choice", "a batch has no tools", "none", "auto"),
    *_refused((BATCH,), "tools", "a batch has no tools", []),
)  # fmt: skip

_SETTLED: Final = {
    endpoint: [known for known in KNOWN if endpoint in known.endpoints and known.fate is not Fate.TAKEN]
    for endpoint in ENDPOINTS
}
