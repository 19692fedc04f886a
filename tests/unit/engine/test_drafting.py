"""Answers with a draft model's draft tokens, by a node's own scheduler, against the same answers without: tokens and
logprobs to the bit, whether it writes what comes or not.
"""

import pytest

from decode_node.speculation import DraftModel
from engine.build import build_engine
from engine.drafting import Drafter
from protos import convert, fleet_pb2, inference_pb2
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepCosts, StepRates
from serving_core.requests import DraftWork, Request, SamplingParams, Share
from serving_core.settings import EngineSettings
from serving_core.shapes import MIXED, preset
from serving_node.scheduler import Limits, NodeScheduler
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.unit.engine.test_acceptance import BLOCK_SIZE, SAMPLINGS

MAX_TOKENS = 40
BUDGET = 64
SLOTS = 16
SAMPLING_PARAMS = [SamplingParams(max_tokens=MAX_TOKENS, **fields) for fields in SAMPLINGS.values()]
PROMPTS = [[(7 * index + 3 * at) % 200 for at in range(5 + 3 * index)] for index in range(len(SAMPLING_PARAMS))]


def read(engine, prompts, samplings, *, num_blocks, drafter=None):
    """What each prompt is answered by a node with so many blocks, with its logprobs, and its scheduler. The draft model
    takes no time: it is asked whenever it may be."""
    model = drafter and DraftModel(drafter.engine.num_blocks, BLOCK_SIZE, drafter.engine.max_model_len, 0.0)
    scheduler = NodeScheduler(
        BlockAllocator(num_blocks, caching=False),
        engine.layout,
        Limits(BUDGET, SLOTS, 100, 1e9, 1e9, 4 if drafter else 0, model),
        preset(MIXED, max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS),
        block_bytes=1,
        fingerprint=engine.fingerprint,
        numerics=engine.numerics,
        is_batch_invariant=engine.is_batch_invariant,
        eos_token_ids=engine.eos_token_ids,
        rates=StepRates(),
        costs=StepCosts(),
    )
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        request = Request(str(index), index + 1, list(prompt), len(prompt), sampling)
        job = convert.job_to_wire(request, request.epoch)
        scheduler.handle(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=job, local_prefill=True)), 0.0)
        if sampling.grammar:
            scheduler.compiled(scheduler.node_requests.find(request).request, engine.grammars.guide(sampling.grammar))
    given = {str(index): [] for index in range(len(prompts))}
    while works := scheduler.plan(0.0):
        tokens = engine.step(works)
        sampled = iter(tokens)
        for work in works:
            taken = [(token.token_id, token.logprob, token.top_logprobs) for token in work.take(sampled)]
            given[work.request.request_id] += taken
        scheduler.step_done(works, tokens, 1.0, 0.0)
        scheduler.decisions.take()
        if drafter and (ahead := scheduler.speculation.drafts.plan()):
            scheduler.speculation.drafts.drafted(ahead, drafter.propose(ahead), 0.0)
            scheduler.speculation.drafts.check_integrity()
    return given, scheduler


def test_what_is_written_ahead_is_what_the_model_would_say(tmp_path):
    """Chunk by chunk or at once, one answer or several, beside one that only reads."""
    engine = build_engine(
        EngineSettings(model=str(write_fake_model(tmp_path)), block_size=BLOCK_SIZE, num_kv_blocks=60)
    )
    drafter = Drafter(engine)
    assert drafter.measure_step_s() > 0
    texts = [list(range(97, 97 + num)) for num in (1, 2, 11)]
    blocks = [range(20 * index, 20 * index + 20) for index in range(3)]
    chunk = DraftWork(Share(texts[2][:7], 0, blocks[2], samples=False), 0)
    works = [DraftWork(Share(text, 0, held, samples=True), 3) for text, held in zip(texts[:2], blocks, strict=False)]
    *written, nothing = drafter.propose([*works, chunk])
    assert nothing == []
    (rest,) = drafter.propose([DraftWork(Share(texts[2][7:], 7, blocks[2], samples=True), 2)])
    for text, tokens in zip(texts, [*written, rest], strict=True):
        for token in tokens:
            assert token == (sum(each * at for at, each in enumerate(text, 1)) + len(text)) % engine.config.vocab_size
            text.append(token)


@pytest.fixture(scope="module")
def engine(written):
    folder = written(write_tiny_model, dtype="bfloat16")
    engine = build_engine(EngineSettings(model=str(folder), block_size=BLOCK_SIZE, num_kv_blocks=400))
    if not engine.is_batch_invariant:
        pytest.skip("bits depend on the batch here, so there are no draft tokens")
    return engine


@pytest.fixture(scope="module")
def expected(engine):
    """Return the answers without draft tokens."""
    return read(engine, PROMPTS, SAMPLING_PARAMS, num_blocks=400)[0]


@pytest.mark.parametrize(
    ("draft", "num_blocks"),
    [
        pytest.param("itself", 400, marks=pytest.mark.nightly),
        ("itself", 40),  # some give way
        ("another", 400),
        pytest.param("another", 40, marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_without(engine, expected, written, draft, num_blocks):
    """Greedy, sampled, penalised and structured."""
    layers = {} if draft == "itself" else {"num_hidden_layers": 1}
    folder = written(write_tiny_model, dtype="bfloat16", **layers)
    drafter = Drafter(build_engine(EngineSettings(model=str(folder), block_size=BLOCK_SIZE, num_kv_blocks=200)))
    given, scheduler = read(engine, PROMPTS, SAMPLING_PARAMS, num_blocks=num_blocks, drafter=drafter)
    assert given == expected
    load = inference_pb2.NodeLoad()
    scheduler.fill(load)
    assert bool(load.num_preemptions) == (num_blocks < 400)
    counts = scheduler.speculation.counts
    assert counts.num_proposed > 0
    assert counts.num_accepted > 0 or draft == "another"
