"""Answers of models out of GGUF files, beside those of transformers."""

from engine.build import build_engine
from serving_core.settings import EngineSettings
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import greedy_answers

PROMPTS = [list(b"The"), list(b"a longer prompt, of two blocks at least"), list(b"ab" * 40)]
NUM_TOKENS = 12


def answers(folder, **settings):
    engine = build_engine(EngineSettings(model=str(folder), num_kv_blocks=64, device="cpu", **settings))
    return token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS, ignore_eos=True)))


def check_answers(found, model):
    """Check that answers are those of a transformers model."""
    assert found == greedy_answers(model, PROMPTS, NUM_TOKENS, found, ignore_eos=True)
