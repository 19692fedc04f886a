"""What the scheduler's side of the KV connector tells the workers. vLLM's objects are stood in for by plain ones."""

from types import SimpleNamespace as Of

from splitserve_vllm.scheduling import ADDRESSES, RECEIVE, SEND, SENDERS, Chunk, Load, Scheduling

BLOCK = 4


def request(name="a", num_tokens=10, status="FINISHED_LENGTH_CAPPED", **params):
    return Of(request_id=name, num_prompt_tokens=num_tokens, kv_transfer_params=params, status=Of(name=status))


def new(name, num_tokens, block_ids, num_computed=0, **params):
    sampling = Of(extra_args={"kv_transfer_params": params})
    return Of(
        req_id=name,
        sampling_params=sampling,
        prompt_token_ids=[0] * num_tokens,
        block_ids=(block_ids,),
        num_computed_tokens=num_computed,
    )


def output(new_requests=(), cached=(), resumed=(), **num_scheduled):
    names, blocks, computed = zip(*cached, strict=True) if cached else ((), (), ())
    rows = Of(req_ids=names, new_block_ids=blocks, num_computed_tokens=computed, resumed_req_ids=set(resumed))
    return Of(scheduled_new_reqs=list(new_requests), scheduled_cached_reqs=rows, num_scheduled_tokens=num_scheduled)


def test_a_prompt_of_another_node_loads_all_that_is_not_cached():
    side = Scheduling(BLOCK)
    asked = request(**{RECEIVE: 7, ADDRESSES: ["a"]})
    assert side.num_to_load(asked, 4) == (6, True)
    side.allocated(asked, [8, 3, 5, 9], 6)
    assert side.step(output()).loads == [Load(7, "a", [8, 3, 5], 1, 10, ["a"])]
    assert side.step(output()).loads == []


def test_a_load_knows_the_parallelism_of_who_sends():
    side = Scheduling(BLOCK)
    side.allocated(request(**{RECEIVE: 7, ADDRESSES: ["a", "b"], SENDERS: (2, 3)}), [8, 3, 5], 10)
    assert side.step(output()).loads == [Load(7, "a", [8, 3, 5], 0, 10, ["a", "b"], prefill_tp=2, prefill_pp=3)]


def test_other_requests_load_nothing():
    assert Scheduling(BLOCK).num_to_load(request(), 0) == (0, False)
    assert Scheduling(BLOCK).num_to_load(Of(request_id="a", kv_transfer_params=None), 0) == (0, False)


def test_a_preempted_request_is_computed_here():
    side = Scheduling(BLOCK)
    asked = request(**{RECEIVE: 7, ADDRESSES: ["a"]})
    side.allocated(asked, [1, 2, 3], 10)
    assert side.num_to_load(asked, 0) == (0, False)
    assert side.finished(asked, True) is False


def test_chunks_name_full_blocks_and_at_the_end_all():
    side = Scheduling(BLOCK)
    first = side.step(output([new("a", 10, [5, 6], **{SEND: 7})], a=6))
    second = side.step(output(cached=[("a", ([2],), 6), ("b", None, 3)], a=4, b=1))
    assert (first.chunks, second.chunks) == ([Chunk(7, [5])], [Chunk(7, [5, 6, 2])])


def test_cached_tokens_are_part_of_the_first_chunk():
    side = Scheduling(BLOCK)
    assert side.step(output([new("a", 10, [5, 6, 2], 8, **{SEND: 7})], a=2)).chunks == [Chunk(7, [5, 6, 2])]


def test_a_preempted_prompt_begins_again():
    side = Scheduling(BLOCK)
    side.step(output([new("a", 10, [5, 6], **{SEND: 7})], a=6))
    again = side.step(output(cached=[("a", ([1, 2, 3],), 0)], resumed=["a"], a=10))
    assert (again.dropped, again.chunks) == ([7], [Chunk(7, [1, 2, 3])])


def test_a_finished_prompt_keeps_its_blocks():
    side = Scheduling(BLOCK)
    side.step(output([new("a", 10, [5, 6, 2], **{SEND: 7})], a=10))
    assert side.finished(request(), True) is True
    assert side.step(output()).held == {"a": 7}


def test_an_aborted_prompt_keeps_nothing():
    side = Scheduling(BLOCK)
    side.step(output([new("a", 10, [5, 6, 2], **{SEND: 7})], a=10))
    assert side.finished(request(status="FINISHED_ABORTED"), True) is False
    assert side.step(output()).dropped == [7]


def test_a_request_without_a_transfer_ends_at_once():
    assert Scheduling(BLOCK).finished(request(), True) is False
