"""A model that says what its scripts say: a real Llama, by whose weights the next token depends on the last one alone.

    a chat                                  Hello there.
    a chat with tools to call               <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>
    a chat that a tool's "sunny" ends       The sun shines.
    a prompt                                goes on in the alphabet up to h, and from a again: "ab" with "cdefghab..."

No temperature changes that. Where a grammar does, texts have one character, and lists and objects end when they may.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests import tiny_models
from tests.tiny_models import ASSISTANT, EOS

OFFERED: Final = "<|offered|>"  # ends the prompt of a chat with tools
SUNNY: Final = "sunny"
GREETING: Final = ("Hello", " there.")
CALL: Final = ("<tool_call>", '{"name": "weather", ', '"arguments": {"city": ', '"Paris"}}', "</tool_call>")
REPORT: Final = ("The sun", " shines.")
WORDS: Final = (OFFERED, SUNNY, *GREETING, *CALL, *REPORT)  # tokens behind those of the tiny models
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} in <tool_call>{% endfor %}"
    "{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}"
    "{% if messages[-1].role != 'tool' %}{{ '" + OFFERED + "' if tools else '<|assistant|>' }}{% endif %}"
)

VOCAB_SIZE: Final = 288
LIKELY, LIKELIER, CERTAIN = 2.0, 3.0, 10.0  # times the root of the vocabulary's size, which the last norm brings


def write_scripted_model(folder: Path) -> Path:
    """Writes the folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=VOCAB_SIZE,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2**16,
        tie_word_embeddings=False,
        bos_token_id=tiny_models.BOS,
        eos_token_id=EOS,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)  # so that no layer adds anything
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE))
        model.lm_head.weight[ord('"')] = LIKELIER
        model.lm_head.weight[[*b"]}"]] = LIKELY
        for last, following in _successors().items():
            model.lm_head.weight[following, last] = CERTAIN
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _successors() -> dict[int, int]:
    """The token that follows each, where a script says so."""
    ids = {word: tiny_models.VOCAB_SIZE + index for index, word in enumerate(WORDS)}
    scripts = [
        [ASSISTANT, *map(ids.get, GREETING), EOS],
        [*map(ids.get, (OFFERED, *CALL)), EOS],
        [*map(ids.get, (SUNNY, *REPORT)), EOS],
        [EOS, *b"abcdefgha"],  # behind an end that is ignored
        b'"x',
    ]
    return dict(pair for script in scripts for pair in pairwise(script))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    tiny_models.write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.save(str(path))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHAT_TEMPLATE}))
