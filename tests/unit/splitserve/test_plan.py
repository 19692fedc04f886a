"""`splitserve plan-transfer`: pictures drawn by hand, and bytes worked out on paper."""

import json

from click.testing import CliRunner

from kv_transfer.plan import Grid
from serving_core.layout import KVLayout
from splitserve.cli import main
from splitserve.commands.plan_transfer import picture, plan_transfer
from tests.effort import pairwise
from tests.tiny_models import write_fake_model


def run(*arguments):
    result = CliRunner().invoke(main, ["plan-transfer", *arguments])
    return result.exit_code, result.stdout, result.stderr


def drawn(prefill_tp, decode_tp, num_kv_heads):
    return picture(plan_transfer(Grid(prefill_tp), Grid(decode_tp), num_kv_heads))


def test_two_ranks_to_four():
    assert drawn(2, 4, 4) == [
        "prefill node                 decode node",
        "rank 0 ■■··   ── head 0 ──▶  rank 0 ■···",
        "              ── head 1 ──▶  rank 1 ·■··",
        "rank 1 ··■■   ── head 2 ──▶  rank 2 ··■·",
        "              ── head 3 ──▶  rank 3 ···■",
    ]


def test_four_ranks_to_two():
    assert drawn(4, 2, 8)[1:] == [
        "rank 0 ■■······  ── heads 0-1 ──▶  rank 0 ■■■■····",
        "rank 1 ··■■····  ── heads 2-3 ──▶",
        "rank 2 ····■■··  ── heads 4-5 ──▶  rank 1 ····■■■■",
        "rank 3 ······■■  ── heads 6-7 ──▶",
    ]


def test_a_rank_that_has_nothing_to_send():
    assert drawn(2, 1, 1)[1:] == [
        "rank 0 ■      ── head 0 ──▶  rank 0 ■",
        "rank 1 ■      sends nothing",
    ]


def test_many_heads_are_written_out():
    assert drawn(2, 1, 128)[1:] == [
        "rank 0 heads 0-63    ─── heads 0-63 ───▶  rank 0 heads 0-127",
        "rank 1 heads 64-127  ── heads 64-127 ──▶",
    ]


def test_the_ranks_of_large_nodes_are_aligned():
    lines = drawn(12, 1, 12)
    assert lines[1].startswith("rank  0 ■···········  ─")
    assert lines[12].startswith("rank 11 ···········■  ─")
    assert len({line.index("▶") for line in lines[1:]}) == 1


@pairwise(prefill_tp=range(1, 9), decode_tp=range(1, 9), num_kv_heads=[1, 2, 3, 8])
def test_every_decode_rank_gets_each_of_its_heads_once_from_a_rank_that_holds_it(prefill_tp, decode_tp, num_kv_heads):
    plan = plan_transfer(Grid(prefill_tp), Grid(decode_tp), num_kv_heads)
    for rank in plan.decode_ranks:
        channels = [channel for channel in plan.channels if channel.decode_rank == rank.rank]
        arrived = sorted(channel.first_head + index for channel in channels for index in range(channel.num_heads))
        assert arrived == [*range(rank.first_head, rank.first_head + rank.num_heads)]
    for channel in plan.channels:
        holder = plan.prefill_ranks[channel.prefill_rank]
        assert holder.first_head <= channel.first_head
        assert channel.first_head + channel.num_heads <= holder.first_head + holder.num_heads


def test_the_bytes_of_ranks_and_channels():
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype="bfloat16")
    plan = plan_transfer(Grid(2), Grid(1), 3, layout, 33)
    # One head of a token: 2 layers, K and V, 8 values of 2 bytes. 33 tokens are three blocks of 16.
    head_bytes = 2 * 2 * 8 * 2
    assert [(channel.num_heads, channel.token_bytes, channel.prompt_bytes) for channel in plan.channels] == [
        (1, head_bytes, 48 * head_bytes),
        (2, 2 * head_bytes, 48 * 2 * head_bytes),
    ]
    assert [rank.prompt_bytes for rank in plan.prefill_ranks] == [48 * head_bytes, 48 * 2 * head_bytes]
    assert [rank.prompt_bytes for rank in plan.decode_ranks] == [48 * 3 * head_bytes]


def test_stages_hold_and_send_their_own_layers(tmp_path):
    layout = KVLayout.uniform(num_layers=5, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
    plan = plan_transfer(Grid(1, 2), Grid(2), 2, layout, 16)
    head_bytes = 2 * 8 * 2  # K and V of a head of a token in one layer
    channels = [(channel.first_layer, channel.num_layers, channel.token_bytes) for channel in plan.channels]
    assert channels == [(0, 2, 2 * head_bytes), (2, 3, 3 * head_bytes)] * 2
    assert [rank.token_bytes for rank in plan.prefill_ranks] == [2 * 2 * head_bytes, 3 * 2 * head_bytes]
    assert picture(plan)[1:] == [
        "rank 0 ■■ layers 0-1  ── head 0 layers 0-1, 1.0 KiB ──▶  rank 0 ■·",
        "rank 1 ■■ layers 2-4  ── head 0 layers 2-4, 1.5 KiB ──▶",
        "rank 0 ■■ layers 0-1  ── head 1 layers 0-1, 1.0 KiB ──▶  rank 1 ·■",
        "rank 1 ■■ layers 2-4  ── head 1 layers 2-4, 1.5 KiB ──▶",
    ]
    code, text, _ = run(str(write_fake_model(tmp_path, num_layers=5)), "--prefill-pp", "2")
    assert (code, "prefill rank 1 sends heads 0-1 in layers 2-4 to decode rank 0" in text) == (0, True)


def test_without_a_model_there_are_no_bytes():
    code, text, _ = run("--prefill-tp", "2", "--decode-tp", "4", "--kv-heads", "4")
    assert code == 0
    assert "prefill rank 0 holds heads 0-1 of 4" in text
    assert "prefill rank 1 sends head 3 to decode rank 3: 25 % of the bytes sent" in text
    assert "one token" not in text


def test_the_model_folder_tells_heads_and_bytes(tmp_path):
    model = write_fake_model(tmp_path, num_layers=2, num_kv_heads=4, head_dim=64)
    code, text, _ = run(str(model), "--decode-tp", "2", "--prompt-tokens", "1000")
    assert code == 0
    # 2 layers x 4 heads x 64 values x 4 bytes x 2 for K and V: 4 KiB; 63 blocks of 16 tokens: 1008 of them.
    assert "one token takes 4.0 KiB of KV: 2 layers, 4 KV heads of 64 float32 values, K and V" in text
    assert "a prompt of 1000 tokens is 63 blocks of 16, 3.9 MiB; 3.9 MiB are sent" in text
    assert "channel prefill rank 0 → decode rank 1 moves 2.0 KiB of each token, 2.0 MiB of the prompt" in text


def test_a_latent_is_one_head_that_every_rank_holds(tmp_path):
    sizes = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16", "max_position_embeddings": 4096}
    names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **latent, **names, "intermediate_size": 18432}))
    code, text, _ = run(str(tmp_path), "--prefill-tp", "2", "--decode-tp", "2", "--prompt-tokens", "16")
    assert code == 0
    # 61 layers x (512 + 64) values x 2 bytes, where keys and values would be 128 heads of 192 + 128.
    assert "one token takes 68.6 KiB of KV: 61 layers, a latent of 576 bfloat16 values, which every rank" in text
    assert "a prompt of 16 tokens is 1 block of 16, 1.1 MiB; 2.1 MiB are sent" in text
    assert "decode rank 1 holds 68.6 KiB of each token" in text
    layout = json.loads(run(str(tmp_path), "--json")[1])["layout"]
    assert (layout["num_kv_heads"], layout["head_dim"], layout["is_latent"]) == (1, 576, True)


def test_replicated_heads_are_sent_more_than_once(tmp_path):
    model = write_fake_model(tmp_path, num_layers=1, num_kv_heads=1, head_dim=128)
    _, text, _ = run(str(model), "--decode-tp", "2", "--prompt-tokens", "16")
    assert "a prompt of 16 tokens is 1 block of 16, 16.0 KiB; 32.0 KiB are sent" in text


def test_a_quantized_cache_is_smaller_by_its_scales_and_data(tmp_path):
    model = write_fake_model(tmp_path, num_layers=1, num_kv_heads=2, head_dim=8)
    _, text, _ = run(str(model), "--kv-cache-dtype", "int8", "--prompt-tokens", "16", "--json")
    channel = json.loads(text)["channels"][0]
    # K and V: 16 tokens x 2 heads x 8 bytes, and a scale of 4 bytes for each head.
    assert channel["prompt_bytes"] == 2 * (16 * 2 * 8 + 2 * 4)


def test_json(tmp_path):
    model = write_fake_model(tmp_path, num_layers=1, num_kv_heads=2, head_dim=8)
    code, text, _ = run(str(model), "--prefill-tp", "2", "--json", "--prompt-tokens", "32")
    plan = json.loads(text)
    assert code == 0
    assert plan["channels"][1] == {
        "prefill_rank": 1,
        "decode_rank": 0,
        "first_head": 1,
        "num_heads": 1,
        "first_layer": 0,
        "num_layers": 1,
        "token_bytes": 64,
        "prompt_bytes": 2048,
    }
    assert plan["layout"] == {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "block_size": 16, "dtype": "float32"}
    assert plan["prompt_tokens"] == 32
    assert json.loads(run("--kv-heads", "2", "--json")[1])["channels"][0]["prompt_bytes"] is None


def test_what_cannot_be_planned(tmp_path):
    code, _, error = run(str(tmp_path), "--kv-heads", "2")
    assert (code, "not both" in error) == (2, True)
    code, _, error = run("--kv-heads", "2", "--prefill-tp", "65")
    assert (code, "1<=x<=64" in error) == (2, True)
    code, _, error = run("--kv-heads", "2", "--decode-pp", "2")
    assert (code, "--kv-heads does not say how many there are" in error) == (2, True)
    code, _, error = run("--prefill-tp", "64", "--prefill-pp", "2")
    assert (code, "64 ranks are the most" in error) == (2, True)
    code, _, error = run(str(tmp_path))
    assert (code, error.startswith("Error: ")) == (2, True)
