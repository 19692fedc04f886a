"""The coordinator's ports over TLS, asked by gRPC, httpx and OpenAI's client, and by Python's own TLS; certificates
that are exchanged under running sequences."""

import asyncio
import contextlib
import datetime
import shutil
import ssl
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx2
import pytest

from coordinator.api.tls import ServerTls
from coordinator.settings import CoordinatorSettings, check_settings
from serving_core.errors import SettingsError
from serving_core.net.tls import TlsFiles, TlsSettings, client_context
from splitserve import AsyncClient
from splitserve.client.errors import Unavailable
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, begin, begin_to_write, cluster, read_all, run, step
from tests.tls_kit import authority, files_of, flags_of, serial_of, shown_at, with_dates
from tests.unit.coordinator.later import openai

LENGTH = events.LENGTH
LOGGER = "coordinator.api.tls"


@pytest.fixture
def certs(tmp_path):
    return authority(tmp_path / "certs")


@pytest.fixture
def others(tmp_path):
    return authority(tmp_path / "others")


def tls_cluster(tmp_path, certs, role="", **settings):
    """A coordinator that is asked over TLS, and by its nodes without: it has no CA for those."""
    files = files_of(certs, "coordinator")
    ca = files.ca if settings.get("tls_verify_clients") else ""
    given = TlsSettings(files.cert, files.key, ca)
    return cluster(
        tmp_path / "model",
        () if ca else ("p0", "d0"),
        credentials(certs, role),
        tls=given,
        http_port=0,
        served_model_name="m",
        **settings,
    )


def credentials(certs, role=""):
    """As gRPC makes them."""
    ca = (certs / "ca.crt").read_bytes()
    if not role:
        return grpc.ssl_channel_credentials(ca)
    return grpc.ssl_channel_credentials(ca, (certs / f"{role}.key").read_bytes(), (certs / f"{role}.crt").read_bytes())


def url_of(c):
    return f"https://localhost:{c.server.http_port}"


async def answered(c, call):
    """Answers a call in two tokens."""
    attempt = await begin_to_write(c, "a")
    await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
    return await call


# ---- answers ----


def test_whole_answers_over_grpc_and_http(tmp_path, certs):
    async def scenario():
        async with tls_cluster(tmp_path, certs) as c:
            assert (await answered(c, asyncio.create_task(read_all(c.generate(max_tokens=2)))))[0] == "ab"
            context = client_context(TlsFiles(ca=str(certs / "ca.crt")))
            async with httpx2.AsyncClient(base_url=url_of(c), timeout=DEADLINE_S, verify=context) as client:
                body = {"prompt": "hello", "max_tokens": 2}
                reply = await answered(c, asyncio.create_task(client.post("/v1/completions", json=body)))
                assert reply.json()["choices"][0]["text"] == "ab"

    run(scenario())


def test_openais_client_streams_over_tls(tmp_path, certs):
    async def scenario():
        context = client_context(TlsFiles(ca=str(certs / "ca.crt")))
        async with (
            tls_cluster(tmp_path, certs) as c,
            openai.AsyncOpenAI(
                base_url=f"{url_of(c)}/v1", api_key="none", http_client=http_client_of_openai(context)
            ) as client,
        ):

            async def ask():
                stream = await client.completions.create(model="m", prompt="hello", max_tokens=2, stream=True)
                return "".join([part.choices[0].text async for part in stream])

            assert await answered(c, asyncio.create_task(ask())) == "ab"

    run(scenario())


def http_client_of_openai(context):
    return openai.DefaultAsyncHttpxClient(verify=context, timeout=DEADLINE_S)


def test_our_client_with_a_ca(tmp_path, certs):
    async def scenario():
        ca = str(certs / "ca.crt")
        async with tls_cluster(tmp_path, certs) as c:
            for target in (f"https://127.0.0.1:{c.server.port}", f"127.0.0.1:{c.server.port}"):
                async with AsyncClient(target, tls_ca=ca) as client:
                    assert (await client.model_info()).served_model_name == "m"
            async with AsyncClient(f"[::ffff:127.0.0.1]:{c.server.port}", tls_ca=ca, tls_server_name="::1") as client:
                assert await client.health()

    run(scenario())


def test_a_client_that_leaves_over_tls_cancels_its_call(tmp_path, certs):
    async def scenario():
        context = client_context(TlsFiles(ca=str(certs / "ca.crt")))
        async with tls_cluster(tmp_path, certs) as c:
            async with httpx2.AsyncClient(base_url=url_of(c), timeout=DEADLINE_S, verify=context) as client:
                call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hello"}))
                attempt, _ = await begin(c)
                call.cancel()
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


# ---- who does not get in ----


def refused_for(tmp_path, certs, client, words, **settings):
    """`client` makes one of a port."""

    async def scenario():
        async with tls_cluster(tmp_path, certs, **settings) as c, client(c.server.port) as asking:
            with pytest.raises(Unavailable) as caught:
                await asking.model_info()
        assert words in str(caught.value)

    run(scenario())


def test_a_client_without_tls_is_told_how(tmp_path, certs):
    words = "what listens there hangs up at once, as a TLS port does; https://127.0.0.1:"
    refused_for(tmp_path, certs, lambda port: AsyncClient(f"127.0.0.1:{port}"), words)


def test_a_client_with_another_ca(tmp_path, certs, others):
    words = "the certificate that is shown there is of no CA that is known here: see --tls-ca"
    ca = str(others / "ca.crt")
    refused_for(tmp_path, certs, lambda port: AsyncClient(f"127.0.0.1:{port}", tls_ca=ca), words)
    refused_for(tmp_path, certs, lambda port: AsyncClient(f"https://127.0.0.1:{port}"), words)


def test_a_client_that_dials_another_name(tmp_path, certs):
    ca = str(certs / "ca.crt")
    words = "the certificate that is shown there is for other names than the one that was dialled"
    refused_for(
        tmp_path, certs, lambda port: AsyncClient(f"127.0.0.1:{port}", tls_ca=ca, tls_server_name="a.test"), words
    )


def test_a_client_over_tls_at_a_port_without(tmp_path, certs):
    async def scenario():
        async with cluster(tmp_path / "model", ()) as c:
            ca = str(certs / "ca.crt")
            async with AsyncClient(f"127.0.0.1:{c.server.port}", tls_ca=ca) as client:
                with pytest.raises(Unavailable, match="what listens there does not speak TLS"):
                    await client.model_info()

    run(scenario())


def test_a_certificate_that_has_expired_meanwhile(tmp_path, certs, monkeypatch):
    """The coordinator was started half an hour ago, and the certificate has expired in the middle of that."""
    with_dates(certs, "coordinator", -9, -0.25 / 24)
    then = SimpleNamespace(now=lambda zone: datetime.datetime.now(zone) - datetime.timedelta(hours=0.5))
    monkeypatch.setattr("serving_core.net.tls.datetime", SimpleNamespace(datetime=then, UTC=datetime.UTC))
    words = "the certificate that is shown there has expired"
    ca = str(certs / "ca.crt")
    refused_for(tmp_path, certs, lambda port: AsyncClient(f"127.0.0.1:{port}", tls_ca=ca), words)


def test_clients_without_a_certificate_where_one_is_asked_for(tmp_path, certs, others):
    async def scenario():
        flags = flags_of(certs, "client")
        async with tls_cluster(tmp_path, certs, "client", tls_verify_clients=True) as c:
            target = f"https://127.0.0.1:{c.server.port}"
            async with AsyncClient(target, **flags) as client:
                assert (await client.model_info()).served_model_name == "m"
            strangers = [
                {"tls_ca": flags["tls_ca"]},
                {**flags_of(others, "client"), "tls_ca": flags["tls_ca"]},
            ]
            for given in strangers:
                async with AsyncClient(target, **given) as client:
                    with pytest.raises(Unavailable, match=r"may ask for a certificate of its CA \(--tls-cert\)"):
                        await client.model_info()
                context = client_context(TlsFiles(given.get("tls_cert", ""), given.get("tls_key", ""), given["tls_ca"]))
                async with httpx2.AsyncClient(base_url=url_of(c), timeout=DEADLINE_S, verify=context) as client:
                    with pytest.raises(httpx2.TransportError):
                        await client.get("/health")
            context = client_context(files_of(certs, "client"))
            async with httpx2.AsyncClient(base_url=url_of(c), timeout=DEADLINE_S, verify=context) as client:
                assert (await client.get("/v1/models")).status_code == 200

    run(scenario())


# ---- certificates that are exchanged ----


def test_an_exchanged_certificate_counts_for_new_connections_and_running_answers_go_on(tmp_path, certs, caplog):
    caplog.set_level("INFO", LOGGER)

    async def scenario():
        async with tls_cluster(tmp_path, certs) as c:
            call = c.generate(max_tokens=3)
            reading = asyncio.create_task(read_all(call))
            attempt = await begin_to_write(c, "a")
            ports = ((c.server.port, "h2"), (c.server.http_port, "http/1.1"))
            before = serial_of(certs / "coordinator.crt")
            for port, protocol in ports:
                assert await asyncio.to_thread(shown_at, port, certs, protocol=protocol) == before
            authority(certs)
            after = serial_of(certs / "coordinator.crt")
            assert after != before
            async with asyncio.timeout(DEADLINE_S):
                for port, protocol in ports:
                    while await asyncio.to_thread(shown_at, port, certs, protocol=protocol) != after:
                        await asyncio.sleep(0.05)
            await step(c.nodes["d0"], attempt, 1, "bc", LENGTH)
            assert (await reading)[0] == "abc"

    run(scenario())
    assert "new connections get the certificate that has come" in caplog.messages


def test_what_does_not_fit_together_is_not_taken_and_said_once(certs, others, caplog):
    tls = ServerTls(files_of(certs, "coordinator"), verifies_clients=False)
    context = tls.http_context()  # as a server has it for its life
    before = certificate_shown_by(context)
    shutil.copy(others / "coordinator.crt", certs / "coordinator.crt")
    tls.refresh()
    tls.refresh()
    [said] = caplog.messages
    assert said.startswith("the certificate stays what it was: --tls-key ")
    assert certificate_shown_by(context) == before
    shutil.copy(others / "coordinator.key", certs / "coordinator.key")
    tls.refresh()
    assert certificate_shown_by(context) not in (None, before)


def certificate_shown_by(context):
    """Return what a server shows on a new connection, in DER."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for each in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            each.do_handshake()
    return client.getpeercert(binary_form=True)


def test_an_exchanged_ca_counts_for_new_connections(tmp_path, certs, others):
    """Over HTTP, with Python's own TLS on the other side."""

    async def scenario():
        async with tls_cluster(tmp_path, certs, "client", tls_verify_clients=True) as c:
            port = c.server.http_port
            await asyncio.to_thread(answer_at, port, certs, certs)
            for name in ("coordinator.crt", "coordinator.key", "ca.crt"):
                shutil.copy(others / name, certs / f"{name}.new")
                (certs / f"{name}.new").rename(certs / name)
            await until_answered(port, others)
            with pytest.raises(httpx2.TransportError):
                await asyncio.to_thread(answer_at, port, others, certs)

    run(scenario())


async def until_answered(port, certs):
    """Return once the server has taken these certificates."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(httpx2.TransportError):
                return await asyncio.to_thread(answer_at, port, certs, certs)
            await asyncio.sleep(0.05)


def answer_at(port, server, client):
    """One answer to a client with the certificate of a folder, which takes a server's of another."""
    files = files_of(client, "client")
    context = client_context(TlsFiles(files.cert, files.key, str(server / "ca.crt")))
    with httpx2.Client(base_url=f"https://localhost:{port}", timeout=DEADLINE_S, verify=context) as asking:
        assert asking.get("/version").status_code == 200


# ---- settings ----


def test_flags_that_need_one_another(certs):
    files = files_of(certs, "coordinator")
    for tls, others, words in (
        (TlsSettings(tls_ca=files.ca), {}, "--tls-cert and --tls-key are missing"),
        (TlsSettings(files.cert, files.key), {"tls_verify_clients": True}, "--tls-ca is missing"),
        (TlsSettings(files.cert), {}, "--tls-key is missing"),
    ):
        with pytest.raises(SettingsError, match=words):
            check_settings(CoordinatorSettings(tls=tls, **others))
    check_settings(CoordinatorSettings(tls=TlsSettings(**flags_of(certs, "coordinator")), tls_verify_clients=True))


def test_nodes_of_other_machines_need_a_ca_beside_tls(certs):
    files = files_of(certs, "coordinator")
    off_loopback = {"fleet_host": "10.0.0.1", "fleet_secret": "s"}
    with pytest.raises(SettingsError, match="the fleet port without --tls-ca is neither authenticated nor encrypted"):
        check_settings(CoordinatorSettings(tls=TlsSettings(files.cert, files.key), **off_loopback))
    for tls in (TlsSettings(files.cert, files.key, files.ca), TlsSettings(files.cert, files.key, trusted_network=True)):
        check_settings(CoordinatorSettings(tls=tls, **off_loopback))


def test_a_bad_file_is_told_before_anything_listens(certs, others):
    cert, key = certs / "coordinator.crt", others / "coordinator.key"
    with pytest.raises(SettingsError, match=f"{Path(key)} is not the key of --tls-cert {Path(cert)}"):
        check_settings(CoordinatorSettings(tls=TlsSettings(str(cert), str(key))))
