"""A machine whose costs one can add up on paper."""

from protos import inference_pb2
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.profile import ControlProfile, Grid, NodeSizes, Profile, StepProfile, TransferProfile

BLOCK_SIZE, BLOCK_BYTES, NUM_LAYERS = 16, 16_000, 10
VOCAB_SIZE = 5000
MESSAGE_S, API_SERVER_S = 0.001, 0.004
LATENCY_S, BYTES_PER_S = 0.003, 16e6  # a block takes 1 ms
TOKEN_S, PROMPT_S = 0.001, 0.002  # a chunk of n tokens: 2 ms + 1 ms each
STEP_S, ANSWER_S = 0.020, 0.001  # a step of n answers: 20 ms + 1 ms each


def chunk_s(num_tokens):
    return PROMPT_S + TOKEN_S * num_tokens


def step_s(num_sequences):
    return STEP_S + ANSWER_S * num_sequences


SIZES = NodeSizes(
    num_blocks=1000,
    block_size=BLOCK_SIZE,
    block_bytes=BLOCK_BYTES,
    num_layers=NUM_LAYERS,
    max_model_len=4096,
    vocab_size=VOCAB_SIZE,
    max_num_batched_tokens=512,
    max_num_seqs=32,
    max_num_queued=256,
    overlap_min_tokens=16,
)
PROFILE = Profile(
    model="paper",
    cores=1,
    node=SIZES,
    steps=StepProfile(
        answers=Grid((1, 2), (0,), ((step_s(1),), (step_s(2),))),
        prompts=Grid((1, 512), (0,), ((chunk_s(1),), (chunk_s(512),))),
        overhead_s=0.0,
    ),
    kv_transfer=TransferProfile(LATENCY_S, BYTES_PER_S),
    control=ControlProfile(MESSAGE_S, API_SERVER_S),
)


def request(index, num_prompt_tokens, num_output_tokens, at_s=0.0):
    """One with a prompt of its own."""
    prompt = tuple((index * 37 + place) % VOCAB_SIZE for place in range(num_prompt_tokens))
    return PlannedRequest(index, at_s, prompt, num_output_tokens)


def abort(coordinator, request_id, now):
    """End a live request; another one is left alone."""
    coordinator.apply(coordinator.scheduler.finish(request_id, inference_pb2.FINISH_REASON_ABORT, now), now)
