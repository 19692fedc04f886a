"""The model by several names, and clients with keys of their own."""

import asyncio
import json
import logging
from functools import partial

import grpc
import pytest

from coordinator.control.request_log import RequestLog
from coordinator.settings import CoordinatorSettings, check_settings
from coordinator.text import chat_template, structures
from protos import inference_pb2
from serving_core.errors import SettingsError
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, begin, cluster, read_all, run
from tests.unit.coordinator.conftest import ProgramHere
from tests.unit.coordinator.http_kit import plain_client, url_of

pytestmark = pytest.mark.usefixtures("programs_here")

ANN, BOB, ALONE = "key-of-ann", "key-of-bob", "key-of-nobody"
BODY = {"prompt": "hello", "max_tokens": 1}


def client_of(c):
    return plain_client(base_url=url_of(c))


async def finish(c):
    """One token, which is also the last."""
    attempt, _ = await begin(c)
    await end(c, attempt)


async def end(c, attempt):
    await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("a"), events.LENGTH)))
    await c.nodes["d0"].answer_cancel(attempt)


def test_any_name_is_taken_and_the_first_is_told(tmp_path):
    async def scenario():
        async with cluster(tmp_path, http_port=0, served_model_name="m, org/m.v1") as c, client_of(c) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(each["id"], each["parent"]) for each in listed] == [("m", None), ("org/m.v1", None)]
            assert (await client.get("/v1/models/org/m.v1")).json()["id"] == "org/m.v1"
            for name in ("m", "org/m.v1", None):
                call = asyncio.create_task(client.post("/v1/completions", json={**BODY, "model": name}))
                await finish(c)
                assert (await call).json()["model"] == "m"
            request = inference_pb2.GenerateRequest(text="hello", model="org/m.v1")
            request.sampling_params.max_tokens = 1
            call = c.stub.Generate(request, timeout=DEADLINE_S)
            await finish(c)
            assert (await read_all(call))[0] == "a"
            reply = await client.post("/v1/completions", json={**BODY, "model": "n"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")

    run(scenario())


@pytest.mark.parametrize("names", ["m,", "m,m", ",", "m,,n"])
def test_names_that_are_none(names):
    with pytest.raises(SettingsError, match="served_model_name must be names with commas between them, each once"):
        check_settings(CoordinatorSettings(served_model_name=names))


def test_a_file_of_keys_opens_addresses_off_loopback(tmp_path):
    (tmp_path / "keys").write_text(ALONE)
    check_settings(CoordinatorSettings(host="0.0.0.0", http_host="0.0.0.0", api_keys_file=str(tmp_path / "keys")))


def test_who_asks_is_in_the_log_and_keys_may_change(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text(f"ann {ANN}\n{ALONE}\n")

    async def status_of(client, key):
        return (await client.get("/v1/models", headers={"x-api-key": key})).status_code

    async def ask_http(c, client, key):
        headers = {"authorization": f"Bearer {key}"}
        call = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=headers))
        await finish(c)
        assert (await call).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": ""}, headers=headers)).status_code == 400

    async def ask_grpc(c, key):
        call = c.stub.Generate(
            inference_pb2.GenerateRequest(text="hello"),
            timeout=DEADLINE_S,
            metadata=(("authorization", f"Bearer {key}"),),
        )
        await finish(c)
        assert (await read_all(call))[0] == "a"

    async def scenario():
        folder = tmp_path / "model"
        async with cluster(folder, http_port=0, api_keys_file=str(file)) as c, client_of(c) as client:
            await ask_http(c, client, ANN)
            await ask_grpc(c, ANN)
            await ask_http(c, client, ALONE)
            assert await status_of(client, BOB) == 401

            file.write_text(f"bob {BOB}\n")
            assert await status_of(client, BOB) == 401  # not before the file is read again
            c.server.reread_api_keys()
            assert [await status_of(client, key) for key in (ANN, BOB)] == [401, 200]
            await ask_grpc(c, BOB)
            stranger = c.stub.GetLoads(inference_pb2.GetLoadsRequest(), metadata=(("authorization", f"Bearer {ANN}"),))
            with pytest.raises(grpc.aio.AioRpcError, match="the API key is missing or wrong"):
                await stranger
            file.write_text("")
            c.server.reread_api_keys()
            assert await status_of(client, BOB) == 200

    run(scenario())
    told = [record for record in caplog.records if record.name == RequestLog.__module__]
    askers = [(record.getMessage(), record.fields.get("asker")) for record in told]
    assert askers == [
        ("request finished", "ann"),
        ("request refused", "ann"),
        ("request finished", "ann"),
        ("request finished", None),
        ("request refused", None),
        ("request finished", "bob"),
    ]
    everything = json.dumps([str(vars(record)) for record in caplog.records])
    assert not [key for key in (ANN, BOB, ALONE) if key in everything]
    assert "the API keys stay what they were" in caplog.text


def test_one_key_cannot_take_every_place(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"ann {ANN}\nbob {BOB}\n")

    async def scenario():
        settings = {"http_port": 0, "api_keys_file": str(file), "max_num_queued_reqs_per_key": 1}
        async with cluster(tmp_path / "model", **settings) as c, client_of(c) as client:
            ask = partial(client.post, "/v1/completions", json=BODY)
            anns, bobs = ({"authorization": f"Bearer {key}"} for key in (ANN, BOB))
            first = asyncio.create_task(ask(headers=anns))
            attempt, _ = await begin(c)
            refused = await ask(headers=anns)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "1 sequences of the API key of ann are in flight" in refused.json()["error"]["message"]
            others = asyncio.create_task(ask(headers=bobs))
            other, _ = await begin(c)
            for each in (attempt, other):
                await end(c, each)
            assert [(await call).status_code for call in (first, others)] == [200, 200]

    run(scenario())


def test_whoever_compiles_and_renders_is_told_for_which_key(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(f"ann {ANN}\n{ALONE}\n")
    told = []

    class Noting(ProgramHere):
        async def ask(self, question, asker=""):
            told.append(asker)
            return await super().ask(question, asker)

    for module in (chat_template, structures):
        monkeypatch.setattr(module, "Program", Noting)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "structured_outputs": {"regex": "a"}}

    async def scenario():
        async with (
            cluster(tmp_path / "m", http_port=0, api_keys_file=str(tmp_path / "keys")) as c,
            client_of(c) as client,
        ):
            for key, name in ((ANN, "ann"), (ALONE, "")):
                headers = {"authorization": f"Bearer {key}"}
                body["structured_outputs"]["regex"] += "?"
                asked = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
                attempt, job = await begin(c)
                assert job.asker == name
                await end(c, attempt)
                assert (await asked).status_code == 200

    run(scenario())
    assert told == ["ann", "ann", "", ""]


OPERATORS = "key-of-operators"


def test_what_is_the_operators_takes_their_key_where_they_have_one(tmp_path):
    async def statuses(c, client, key):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        ui, models = [(await client.get(path, headers=headers)).status_code for path in ("/ui/overview", "/v1/models")]
        calls = (
            c.admin.GetOverview(inference_pb2.GetOverviewRequest(), metadata=tuple(headers.items())),
            c.admin.SetRole(inference_pb2.SetRoleRequest(node="d7", role="mixed"), metadata=tuple(headers.items())),
            c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=tuple(headers.items())),
        )
        return ui, models, [await code_of(call) for call in calls]

    async def code_of(call):
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def scenario():
        nobody, stranger = "UNAUTHENTICATED", [401, 401, ["UNAUTHENTICATED"] * 3]
        async with cluster(tmp_path, http_port=0, api_key=ANN, admin_key=OPERATORS) as c, client_of(c) as client:
            assert [*await statuses(c, client, "")] == stranger
            assert await statuses(c, client, ANN) == (401, 200, [nobody, nobody, "OK"])
            assert await statuses(c, client, OPERATORS) == (200, 200, ["OK", "NOT_FOUND", "OK"])
            refusal = await client.get("/ui/overview", headers={"x-api-key": ANN})
            assert "SPLITSERVE_ADMIN_KEY" in refusal.json()["error"]["message"]
        async with cluster(tmp_path, http_port=0, admin_key=OPERATORS) as c, client_of(c) as client:  # open to clients
            assert await statuses(c, client, "") == (401, 200, [nobody, nobody, "OK"])
            assert await statuses(c, client, OPERATORS) == (200, 200, ["OK", "NOT_FOUND", "OK"])

    run(scenario())


def test_the_operators_key_is_no_clients():
    with pytest.raises(SettingsError, match="admin_key is one of the API keys"):
        check_settings(CoordinatorSettings(api_key=ANN, admin_key=ANN))
