"""How streams over HTTP end whose answers do not: never as whole ones, whoever has died or stopped; and with the API's
own word for it where there is still a process to say it."""

import contextlib
import json
import signal
import threading

import httpx2
import psutil
import pytest

from tests.effort import few
from tests.system.cluster import Cluster, wait_until
from tests.tiny_models import write_fake_model

DEADLINE_S = 240.0
MAX_TOKENS = 4000  # more than there is time for
HI = [{"role": "user", "content": "a"}]
CALLS = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": MAX_TOKENS},
    "/v1/chat/completions": {"messages": HI, "max_tokens": MAX_TOKENS},
    "/v1/responses": {"input": "a", "max_output_tokens": MAX_TOKENS},
    "/v1/messages": {"messages": HI, "max_tokens": MAX_TOKENS},
}
FAILURES = {  # the type of the last event, or where there are no types the field that tells
    "/v1/completions": "error",
    "/v1/chat/completions": "error",
    "/v1/responses": "response.failed",
    "/v1/messages": "error",
}


class Stream(threading.Thread):
    """One call, and what comes of it."""

    def __init__(self, cluster, path):
        super().__init__()
        self.text = ""
        self.error = None
        self._cluster, self._path = cluster, path

    def run(self):
        body = {"model": "m", "stream": True, "ignore_eos": True, **CALLS[self._path]}
        url = f"{self._cluster.url}{self._path}"
        try:
            with httpx2.stream("POST", url, json=body, timeout=DEADLINE_S, trust_env=False) as reply:
                for text in reply.iter_text():
                    self.text += text
        except httpx2.HTTPError as error:
            self.error = error

    @property
    def last(self):
        """The last event."""
        lines = [line for line in self.text.split("\n") if line.startswith("data: ")]
        return json.loads(lines[-1].removeprefix("data: "))


def api_servers_of(cluster):
    coordinator = psutil.Process(cluster.children["coordinator"].process.pid)
    return [each for each in coordinator.children() if "coordinator.api" in each.cmdline()]


def kill_api_servers(cluster):
    for api_server in api_servers_of(cluster):
        with contextlib.suppress(psutil.NoSuchProcess):
            api_server.kill()


def stop(cluster):
    cluster.expect_end("coordinator").send(signal.SIGTERM)


STRIKES = {  # and whether a process is left to tell of it
    "the coordinator is killed": (1, lambda cluster: cluster.kill("coordinator"), False),
    "the coordinator stops": (1, stop, True),
    "all nodes are killed": (1, lambda cluster: cluster.kill(*cluster.names), True),
    "control is killed": (2, lambda cluster: cluster.kill("coordinator"), False),
    "the API servers are killed": (2, kill_api_servers, False),
    "control stops": (2, stop, True),
}


@pytest.mark.parametrize("struck", few(STRIKES, "the coordinator is killed", "the coordinator stops"))
def test_no_unfinished_answer_looks_like_a_whole_one(tmp_path, struck):
    num_api_servers, strike, is_told = STRIKES[struck]
    model = write_fake_model(tmp_path / "model", step_s=0.01, max_position_embeddings=8192)
    coordinator = {"api_server_count": num_api_servers, "drain_s": 0.2, "served_model_name": "m", "node_wait_s": 0.2}
    cluster = Cluster(model, tmp_path, http=True, coordinator=coordinator).start()
    try:
        streams = {path: Stream(cluster, path) for path in CALLS}
        for stream in streams.values():
            stream.start()
        wait_until(lambda: all(stream.text.count("\n\n") > 5 for stream in streams.values()), "all stream", DEADLINE_S)
        strike(cluster)
        for path, stream in streams.items():
            stream.join(DEADLINE_S)
            if not (is_told and path == "/v1/responses"):  # of which the failure is a regular last event
                assert isinstance(stream.error, httpx2.RemoteProtocolError | httpx2.ReadError), path
            assert "[DONE]" not in stream.text, path
            if is_told:
                assert FAILURES[path] in (stream.last.get("type"), *stream.last), path
    finally:
        cluster.kill_everything()
