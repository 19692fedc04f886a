"""The pods of the chart run, each in a network namespace of its own, by the command line, environment, secrets and
probes that the chart gives them. What the kubelet, controllers and Services do is done here."""

import asyncio
import contextlib
import json
import subprocess
import sys

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve import AsyncClient
from tests.network_hosts import NoNetwork, network
from tests.system.cluster import Child, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model
from tests.unit.deploy.chart_kit import RELEASE, container, expanded, rendered, template_of

pytestmark = pytest.mark.nightly

DEADLINE_S = 240.0
SECRETS = {"api-key": "of-the-clients", "fleet-secret": "of-the-fleet"}
MOUNTED = "/run/secrets/splitserve"
FRONT, FLEET = RELEASE, f"{RELEASE}-fleet"  # names of Services, here of the hosts that they lead to
HOSTS = {  # and the workload of each host's pod
    FLEET: "coordinator",
    FRONT: "api-server",
    f"{RELEASE}-prefill-0": "prefill",
    f"{RELEASE}-decode-0": "decode",
    f"{RELEASE}-decode-1": "decode",
}


class Pod:
    """One pod: its process, and its probes."""

    def __init__(self, host, template, hosts, folder):
        self.host, self.address, self.spec = host, hosts.address(host), container(template)
        self.grace_s = template["spec"]["terminationGracePeriodSeconds"]
        self._on, self._folder = hosts.on(host), folder
        self.env = self._environment()
        [before] = template["spec"]["initContainers"]
        self._run([*before["command"], *before["args"]])
        words = [expanded(each, self.env) for each in self.spec["args"]]
        log = folder / f"{host}.log"
        self.child = Child(host, "splitserve", *words, flags={}, log=log, env=self.env, prefix=self._on)

    def _environment(self):
        fields = {"metadata.name": self.host, "status.podIP": self.address}
        found = {}
        for entry in self.spec["env"]:
            value = entry.get("value")
            found[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]] if value is None else value
        return {name: value.replace(MOUNTED, str(self._folder / "secrets")) for name, value in found.items()}

    def _run(self, command):
        words = [*self._on, sys.executable, *command[1:]]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **self.env}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S).returncode == 0

    def passes(self, kind):
        """Whether a probe of this kind passes."""
        probe = self.spec[f"{kind}Probe"]
        if "exec" in probe:
            return self._run(probe["exec"]["command"])
        with contextlib.suppress(grpc.RpcError, httpx2.HTTPError):
            if "grpc" in probe:
                with grpc.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
                    request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
                    status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30).status
                return status == health_pb2.HealthCheckResponse.SERVING
            ports = {each["name"]: each["containerPort"] for each in self.spec["ports"]}
            url = f"http://{self.address}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
            return httpx2.get(url, timeout=30).status_code == 200
        return False

    def wait_until(self, kind):
        def passes():
            assert self.child.is_running, self.child.output()[-2000:]
            return self.passes(kind)

        wait_until(passes, f"{self.host} passes its {kind} probe", DEADLINE_S)

    def stop(self):
        """As a deletion ends it: SIGTERM, and within the grace period the end."""
        assert self.child.stop(max(self.grace_s, DEADLINE_S)) == 0


class Pods:
    def __init__(self, folder, hosts):
        model = write_fake_model(folder / "fake", step_s=0.01)
        values = {"model": str(model), "apiServers": {"replicas": 1}, "settings": {"num-kv-blocks": 2000}}
        [objects] = rendered(values)
        workloads = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Deployment"}
        self._templates = {host: template_of(workloads[f"{RELEASE}-{name}"]) for host, name in HOSTS.items()}
        self._folder, self._hosts = folder, hosts
        self.running = {}
        (folder / "secrets").mkdir()
        for name, value in SECRETS.items():
            (folder / "secrets" / name).write_text(value)

    def start(self, host):
        self.running[host] = Pod(host, self._templates[host], self._hosts, self._folder)
        return self.running[host]

    def stop(self, host):
        self.running.pop(host).stop()

    def kill(self):
        for pod in self.running.values():
            pod.child.kill()

    def address(self, host):
        return self._hosts.address(host)


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(network(list(HOSTS)))
        except NoNetwork as error:
            pytest.skip(str(error))
        made = Pods(tmp_path_factory.mktemp("pods"), hosts)
        stack.callback(made.kill)
        for host in (FLEET, FRONT, f"{RELEASE}-prefill-0", f"{RELEASE}-decode-0"):
            made.start(host)
        for pod in list(made.running.values()):
            for kind in ("startup", "readiness", "liveness"):
                pod.wait_until(kind)
        yield made


def test_clients_are_served_with_their_key_alone(pods):
    url = f"http://{pods.address(FRONT)}:8000/v1/completions"
    body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "stream": False}
    assert httpx2.post(url, json=body, timeout=DEADLINE_S).status_code == 401
    key = {"authorization": f"Bearer {SECRETS['api-key']}"}
    reply = httpx2.post(url, json=body, headers=key, timeout=DEADLINE_S)
    assert reply.status_code == 200, reply.text
    assert json.loads(reply.text)["usage"]["prompt_tokens"] == 3


async def whole(pods, prompt, length):
    got = []
    async with AsyncClient(f"{pods.address(FRONT)}:50051", api_key=SECRETS["api-key"]) as client:
        async for chunk in client.generate(prompt, max_tokens=length, temperature=0, ignore_eos=True, resume=False):
            got += chunk.token_ids
    return got == fake_answer(prompt, length)


def under_load(pods, work):
    """Requests before, meanwhile and after are whole."""

    async def scenario():
        working = asyncio.create_task(asyncio.to_thread(work))
        number = 0
        while not working.done() or number == 0:
            number += 1
            asked = [whole(pods, [number, index, 9], 150) for index in range(6)]
            assert all(await asyncio.gather(*asked))
        await working

    asyncio.run(scenario())


def test_a_rollout_of_the_decode_pool_loses_no_request(pods):
    def roll_out():
        pods.start(f"{RELEASE}-decode-1").wait_until("readiness")
        pods.stop(f"{RELEASE}-decode-0")

    under_load(pods, roll_out)


def test_the_coordinator_is_replaced_while_its_api_server_streams(pods):
    def replace():
        pods.stop(FLEET)
        pods.start(FLEET).wait_until("readiness")

    under_load(pods, replace)
    assert all(pod.passes("readiness") for pod in pods.running.values())
