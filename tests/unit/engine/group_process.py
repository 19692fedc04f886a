"""One rank that tries out its group.

`python -m tests.unit.engine.group_process NAME ARGUMENT` prints one line of JSON. NAME is a function below.
"""

import functools
import json
import os
import socket
import sys
import time

import psutil
import torch

from engine.build import build_engine
from engine.forward_batch import build_batch
from engine.native.program import NativeProgram
from engine.parallel import MOST_EXCHANGED_BYTES, join
from serving_core.errors import RankLost, SettingsError
from serving_core.requests import Request, Share, Work
from serving_core.settings import EngineSettings
from serving_core.sharding import share_of
from tests.toy_scheduler import greedy
from tests.unit.engine.rank_process import TIMEOUT_S

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
WIDTHS = [2, 1, 3]
BLOCKS = [4, 5, 6]


def joined(timeout_s):
    return join(CPU, int(os.environ["WORLD_SIZE"]), timeout_s)


def meet():
    """Returns when both of two ranks are here, however long the start of either takes."""
    with socket.socket(socket.AF_UNIX) as api_server:
        place = f"\0splitserve-meeting-{os.environ['MASTER_PORT']}"
        if os.environ["RANK"] == "0":
            api_server.bind(place)
            api_server.listen()
            api_server.accept()[0].close()
        else:
            while api_server.connect_ex(place):
                time.sleep(0.01)


def collectives(_):
    """Every method of a group, on three ranks."""
    group = joined(TIMEOUT_S)
    sums = []
    with torch.inference_mode():
        for dtype in DTYPES:
            tensor = torch.tensor([[1, 2], [3, 10 * group.rank]], dtype=dtype)
            group.all_reduce(tensor)
            sums.append(tensor.tolist())
        columns = []
        for num_rows in (2, 0):
            for dtype in DTYPES[:2]:
                local = torch.full((num_rows, WIDTHS[group.rank]), float(group.rank), dtype=dtype)
                gathered = group.gather_columns(local, WIDTHS)
                columns.append(
                    None if gathered is None else [str(gathered.dtype), list(gathered.shape), *gathered.tolist()]
                )
    differing = differing_rows(group)
    given = group.exchange(b"\0abc" * group.rank)
    largest = group.exchange(bytes([group.rank]) * MOST_EXCHANGED_BYTES)
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    group.close()
    return {
        "size": group.size,
        "sums": sums,
        "columns": columns,
        "differing": differing,
        "given": [data.hex() for data in given],
        "largest": [[len(data), *set(data)] for data in largest],
        "listening": sorted(listening),
    }


def divided_rows(_):
    group = joined(TIMEOUT_S)
    differing = differing_rows(group)
    group.close()
    return differing


def differing_rows(group):
    """Where the outcome of rows that are divided, and put together again, is not what all_reduce gives: numbers of
    rows, and types."""
    differing = []
    with torch.inference_mode():
        for dtype in DTYPES[:3]:
            for num_rows in range(group.size, 12):
                part = torch.randn(num_rows, 5, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
                summed = part.clone()
                group.all_reduce(summed)
                own = group.reduce_scatter(part)
                whole = group.all_gather(own, num_rows)
                held = share_of(num_rows, group.rank, group.size)
                is_same = torch.equal(own, whole[held.start : held.stop]) and own.dtype == dtype
                if not is_same or not agree(whole, summed, exactly=group.size == 2):
                    differing.append([num_rows, str(dtype)])
    return differing


def agree(one, other, *, exactly):
    """More than two numbers may be added up in another order."""
    return torch.equal(one, other) if exactly else torch.allclose(one, other, rtol=0.02, atol=0.05)


def wrong_block(folder):
    """The fake model's tokens before and after one head of one token changes on the last rank."""
    group = joined(TIMEOUT_S)
    engine = build_engine(EngineSettings(model=folder, device="cpu", block_size=4, num_kv_blocks=8), group)
    request = Request("r", 0, [50] * 9, 9, greedy(1))
    tokens = []
    for work in (Work(request, 0, 9, BLOCKS), Work(request, 8, 1, BLOCKS)):
        if group.rank == 0:
            tokens += [token.token_id for token in engine.step([work])]
        else:
            engine.follow([work.share])
        if group.rank == group.size - 1:
            engine.pool.keys(1)[5, 2, -1, :] += 1
    group.close()
    return tokens


def unlike_ranks(folder):
    """What an engine says whose ranks were given unlike settings."""
    group = joined(TIMEOUT_S)
    try:
        build_engine(EngineSettings(model=folder, device="cpu", sequence_parallel_min_tokens=10 + group.rank), group)
    except SettingsError as error:
        return str(error)
    finally:
        group.close()
    return "nothing"


def unlike_models(folder):
    """What ranks say whose machines have other weights of the same shape."""
    group = joined(TIMEOUT_S)
    try:
        build_engine(EngineSettings(model=f"{folder}/{group.rank}", device="cpu"), group)
    except SettingsError as error:
        return str(error)
    finally:
        group.close()
    return "nothing"


def shared_sums(_):
    """Where what goes through shared memory is not the sum in the order of the ranks: types and numbers of rows, of
    less than fits one slot, and of more."""
    group = joined(TIMEOUT_S)
    differing = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for num_rows in (3, 4, 7, 150, 1200):
                parts = [
                    (torch.randn(num_rows, 577, generator=torch.Generator().manual_seed(rank)) * 9).to(dtype)
                    for rank in range(group.size)
                ]
                expected = functools.reduce(torch.add, parts)
                summed, given = parts[group.rank].clone(), parts[group.rank].clone()
                group.all_reduce(summed)
                own = group.reduce_scatter(given)
                whole = group.all_gather(own, num_rows)
                columns = group.gather_columns(parts[group.rank][:, : 5 + group.rank], [5, 6, 7][: group.size])
                wanted = torch.cat([part[:, : 5 + rank] for rank, part in enumerate(parts)], 1)
                is_wanted = columns is None if group.rank else torch.equal(columns, wanted)
                if not (torch.equal(summed, expected) and torch.equal(whole, expected) and is_wanted):
                    differing.append([str(dtype), num_rows])
    is_shared, adds_alike = group.shared is not None, group.adds_alike
    group.close()
    return [is_shared, adds_alike, differing]


def programs(folders):
    """Of each model, the ranks' program, and whether its steps have the bits of the modules: by the program on all
    ranks, and on rank 0 alone."""
    group = joined(TIMEOUT_S)
    told = []
    for folder in folders.split(","):
        settings = {"model": folder, "device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 64}
        engine = build_engine(EngineSettings(**settings, tensor_parallel_size=group.size), group)
        told.append([type(engine.program).__name__, *(_has_bits_of_modules(engine, number) for number in (1, 3))])
    group.close()
    return told


@torch.inference_mode()
def _has_bits_of_modules(engine, num_requests):
    program, is_leader = engine.program, engine.group.rank == 0
    if program is None:
        return None
    for layer in range(engine.layout.num_layers):
        for caches in (engine.pool.keys(layer), engine.pool.values(layer)):
            caches.copy_(torch.randn(caches.shape, generator=torch.Generator().manual_seed(layer)))
    batch = _decode_batch(num_requests)
    plan = program.plan(batch)
    expected = engine.model(batch, engine.attention)
    by_all = program.run(batch, plan, lambda: None)
    by_leader = program.run(batch, plan, lambda: None) if is_leader else engine.model(batch, engine.attention)
    if not is_leader:
        return expected is by_all is by_leader is None
    return torch.equal(expected, by_all.rows) and torch.equal(expected, by_leader.rows)


def _decode_batch(num_requests):
    shares = [Share((100 + at,), 40 + at, range(9 * at, 9 * at + 9), True) for at in range(num_requests)]
    return build_batch(shares, 16, CPU)


def peer_that_is_gone(_):
    """Which is noticed at once, and not when the time is up."""
    group = joined(600)
    if group.rank == 1:
        os._exit(1)
    return _errors_of_sums(group)


def peer_that_hangs(_):
    meet()
    group = joined(5)
    if group.rank == 1:
        time.sleep(600)
    return _errors_of_sums(group)


def _errors_of_sums(group):
    """Of one in a program, of one that goes through shared memory, and of one that does not."""
    errors, rows = [], torch.ones(4, 4)

    def run():
        program = NativeProgram(1, 4)
        group.shared.record(program, rows)
        program.run(4)
        group.shared.check()

    calls = [lambda: group.all_reduce(rows), lambda: group.all_reduce(rows.long())]
    for summed in calls if group.shared is None else [run, *calls]:
        try:
            summed()
        except RankLost as error:
            errors.append(type(error).__name__)
    group.close()
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
