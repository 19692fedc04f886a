"""The group of a node's ranks: real processes over gloo, what they refuse, and the group of one."""

import json
import os
import re
import socket
from unittest import mock

import pytest
import torch

from engine.native.library import native_library
from engine.native.linear import best_variant
from engine.parallel import MOST_EXCHANGED_BYTES, alone, choose_device, join, on_all_ranks
from serving_core.errors import SettingsError
from tests.effort import few
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.transformers_models import write_any_model
from tests.unit.engine.rank_process import TIMEOUT_S, rank_processes
from tests.unit.engine.test_fake import answer_on_paper

CPU = torch.device("cpu")


def run_group(tp_size, name, argument="", ranks=None):
    """What each of the ranks printed."""
    with rank_processes(tp_size, "tests.unit.engine.group_process", name, argument) as processes:
        outputs = [processes[rank].communicate(timeout=TIMEOUT_S)[0] for rank in ranks or range(tp_size)]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.nightly
def test_collectives_of_three_ranks():
    leader, *followers = run_group(3, "collectives")
    for rank in (leader, *followers):
        assert rank["size"] == 3
        assert rank["sums"] == [[[3, 6], [9, 30]]] * 4  # 0 + 10 + 20
        assert rank["differing"] == []  # of rows that are divided, from the whole sum
        assert rank["given"] == ["", b"\0abc".hex(), (b"\0abc" * 2).hex()]
        assert rank["largest"] == [[MOST_EXCHANGED_BYTES, rank] for rank in range(3)]
        assert set(rank["listening"]) <= {"127.0.0.1"}  # nothing that another machine could reach
    assert leader["listening"] == ["127.0.0.1"]
    row = [0, 0, 1, 2, 2, 2]
    assert leader["columns"] == [
        ["torch.float32", [2, 6], row, row],
        ["torch.bfloat16", [2, 6], row, row],
        ["torch.float32", [0, 6]],
        ["torch.bfloat16", [0, 6]],
    ]
    assert [follower["columns"] for follower in followers] == [[None] * 4] * 2


@pytest.mark.nightly
def test_rows_divided_over_two_ranks_are_to_the_bit_those_of_the_whole_sum():
    assert run_group(2, "divided_rows") == [[], []]


@pytest.mark.skipif(native_library() is None, reason="the native kernels were not built")
@pytest.mark.parametrize("tp_size", few([2, 3]))
def test_ranks_of_one_machine_add_up_in_their_order_through_shared_memory(tp_size):
    assert run_group(tp_size, "shared_sums") == [[True, True, []]] * tp_size


@pytest.mark.skipif(best_variant(torch.bfloat16) is None, reason="bfloat16 products are not native here")
def test_a_decode_program_of_two_ranks_gives_the_bits_of_their_modules(tmp_path):
    """Also where one of them goes module after module. Projections that are normed over all ranks have no program."""
    odd = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54, "intermediate_size": 77}
    models = {"llama": odd, "qwen3": {"tie_word_embeddings": True}, "gemma2": {}, "cohere2": {}, "olmo2": {}}
    folders = [write_any_model(tmp_path / family, family, **config) for family, config in models.items()]
    told = run_group(2, "programs", ",".join(map(str, folders)))
    assert told == [[["NativeDecode", True, True]] * 4 + [["NoneType", None, None]]] * 2


@pytest.mark.nightly
def test_ranks_whose_machines_have_other_weights_are_refused(tmp_path):
    for rank in range(2):
        write_tiny_model(tmp_path / str(rank), seed=rank)
    one, other = run_group(2, "unlike_models", tmp_path)
    assert one == other
    assert re.fullmatch(r"weights must be the same on all ranks, and is [0-9a-f]{64}, [0-9a-f]{64}", one)


@pytest.mark.nightly
def test_without_kernels_they_do_not_share(monkeypatch):
    monkeypatch.setenv("SPLITSERVE_NATIVE", "off")
    for is_shared, adds_alike, _ in run_group(2, "shared_sums"):
        assert (is_shared, adds_alike) == (False, True)


@pytest.mark.parametrize("num_kv_heads", few([2, 1]))
def test_a_wrong_block_on_another_rank_changes_the_answer_of_the_fake_model(num_kv_heads, tmp_path):
    folder = write_fake_model(tmp_path, num_kv_heads=num_kv_heads)
    (tokens, _) = run_group(2, "wrong_block", folder)
    (before, after) = tokens
    assert [before] == answer_on_paper([50] * 9, 1)
    assert after != before


@pytest.mark.parametrize("name", ["peer_that_is_gone", pytest.param("peer_that_hangs", marks=pytest.mark.nightly)])
def test_no_collective_waits_for_ever(name):
    assert run_group(2, name, ranks=[0]) == [["RankLost"] * (2 if native_library() is None else 3)]


def test_the_group_of_one():
    group = alone()
    tensor = torch.ones(2, 3)
    group.all_reduce(tensor)
    assert (group.rank, group.size) == (0, 1)
    assert tensor.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert group.gather_columns(tensor, [3]) is tensor
    assert group.reduce_scatter(tensor) is tensor
    assert group.all_gather(tensor, 2) is tensor
    assert group.exchange(b"data") == [b"data"]
    with pytest.raises(ValueError, match=f"{MOST_EXCHANGED_BYTES} are the most"):
        group.exchange(bytes(MOST_EXCHANGED_BYTES + 1))
    group.close()


@pytest.fixture
def environment():
    """Sets variables and puts them, and what join sets, back."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield os.environ


@pytest.fixture
def free_port():
    """Held, and not listened on: rank 0 can still do that, and nobody else is given it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_one_rank_joins_nothing(environment):
    assert join(CPU, 1, timeout_s=1).size == 1


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "WORLD_SIZE is 1, and --tensor-parallel-size is 2"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, and --tensor-parallel-size is 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', and must be a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK is None, and must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1', and must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, and WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT is None"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "9"}, "MASTER_ADDR is ''"),
    ],
)
def test_variables_that_cannot_be(variables, sentence, environment):
    environment.update(variables)
    with pytest.raises(SettingsError, match=sentence):
        join(CPU, 2, timeout_s=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_in_time(rank, environment, free_port):
    environment.update(WORLD_SIZE="2", RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    with pytest.raises(SettingsError, match=f"rank {rank} did not meet the other ranks at 127.0.0.1:{free_port}"):
        join(CPU, 2, timeout_s=1)


def test_a_port_that_is_taken(environment):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment.update(WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pytest.raises(SettingsError, match="did not meet the other ranks"):
            join(CPU, 2, timeout_s=1)


def test_devices(environment):
    environment["LOCAL_RANK"] = "3"
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto") == CPU
        with pytest.raises(SettingsError, match="there is no CUDA device here"):
            choose_device("cuda")


class Beside:
    """Two ranks, of which the other one says this."""

    size = 2

    def __init__(self, said):
        self._said = said

    def exchange(self, data):
        return [data, self._said]


def test_what_all_ranks_make_is_let_go_where_one_cannot():
    let_go = []
    assert on_all_ranks(Beside(b""), SettingsError, lambda: "made", let_go.append) == "made"
    assert not let_go
    with pytest.raises(SettingsError, match="no room there"):
        on_all_ranks(Beside(b"no room there"), SettingsError, lambda: "made", let_go.append)
    assert let_go == ["made"]


@pytest.mark.parametrize("group", [alone(), Beside(b"")], ids=["alone", "two ranks"])
def test_what_this_rank_cannot_make_fails_as_it_says_and_other_troubles_go_on(group):
    def failing(error):
        raise error

    with pytest.raises(SettingsError, match="no room here"):
        on_all_ranks(group, SettingsError, lambda: failing(SettingsError("no room here")))
    with pytest.raises(KeyError):
        on_all_ranks(group, SettingsError, lambda: failing(KeyError("x")))
