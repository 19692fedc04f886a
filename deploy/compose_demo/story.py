"""What happens to the fleet, and that its answers do not show it."""

import json
import time
from collections.abc import Callable

from answer import Answer
from command import Failed, run, say
from project import Project, container_of, wait_for

PROMPT = "Tell a long story about a lighthouse keeper and a whale."
NUM_TOKENS = 240
EARLY_TOKENS = 40  # that an answer has when something happens to it
NUM_NODES = 4
START_S, BACK_S, ANSWER_S = 240.0, 120.0, 300.0


def play(project: Project) -> None:
    """Raises Failed where an answer is not what it is undisturbed."""
    _start(project)
    undisturbed = _ask(project)
    _kill(project, undisturbed)
    _cut(project, undisturbed)
    _drain(project, undisturbed)


def _start(project: Project) -> None:
    began_s = time.monotonic()
    project.up()
    say("compose has started 1 coordinator, 2 prefill nodes and 2 decode nodes")
    wait_for(lambda: project.num_ready() == NUM_NODES, f"{NUM_NODES} nodes ready", START_S)
    say(f"{NUM_NODES} nodes are ready, {time.monotonic() - began_s:.1f} s after `up`")
    wait_for(lambda: project.num_healthy() == NUM_NODES + 1, f"{NUM_NODES + 1} containers healthy", START_S)
    say(f"{NUM_NODES + 1} containers are healthy, {time.monotonic() - began_s:.1f} s after `up`")


def _ask(project: Project) -> Answer:
    answer = Answer(project.splitserve, PROMPT, NUM_TOKENS).end(ANSWER_S)
    say(f"gRPC: {answer.num_tokens} tokens in {answer.seconds:.1f} s: {answer.text[:60]!r} ...")
    message = {"role": "user", "content": PROMPT}
    body = {"messages": [message], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = json.loads(project.ask_http("/v1/chat/completions", json.dumps(body).encode()))
    text = reply["choices"][0]["message"]["content"]
    if text.strip() != answer.text.strip():
        raise Failed(f"HTTP answers otherwise than gRPC: {text!r}, not {answer.text!r}")
    say("HTTP: the same, through the published port")
    return answer


def _kill(project: Project, undisturbed: Answer) -> None:
    node = _disturb(project, undisturbed, "is killed", lambda node: run(["docker", "kill", container_of(node)]))
    run(["docker", "start", container_of(node)])
    _wait_for_all(project, f"{node} is started again")


def _cut(project: Project, undisturbed: Answer) -> None:
    def cut(node: str) -> None:
        run(["docker", "network", "disconnect", project.network, container_of(node)])

    node = _disturb(project, undisturbed, "is cut off from the network", cut)
    run(["docker", "network", "connect", project.network, container_of(node)])
    _wait_for_all(project, f"{node} has its network again")


def _drain(project: Project, undisturbed: Answer) -> None:
    node = _disturb(project, undisturbed, "is drained", lambda node: run(project.splitserve("drain", node)))
    run(project.splitserve("role", node, "decode"))
    _wait_for_all(project, f"{node} is to write again")


def _disturb(project: Project, undisturbed: Answer, what: str, strike: Callable[[str], object]) -> str:
    """Strikes the node that writes an answer, while it does; gives the node's name."""
    answer = Answer(project.splitserve, PROMPT, NUM_TOKENS)
    wait_for(lambda: answer.num_tokens >= EARLY_TOKENS, f"{EARLY_TOKENS} tokens of an answer", ANSWER_S)
    node = wait_for(lambda: _writer(project), "a node that writes it", ANSWER_S)
    strike(node)
    say(f"{node} {what}, after {answer.num_tokens} of {NUM_TOKENS} tokens")
    answer.end(ANSWER_S)
    if answer.text != undisturbed.text or answer.num_tokens != NUM_TOKENS:
        raise Failed(f"the answer is another one: {answer.text!r}, not {undisturbed.text!r}")
    if not answer.num_changes:
        raise Failed(f"the answer had ended before {node} {what}")
    how = f"{answer.num_changes} change of nodes, longest pause {answer.longest_pause_s:.1f} s"
    say(f"all {answer.num_tokens} tokens came, the same as undisturbed; {how}")
    return node


def _writer(project: Project) -> str | None:
    running = project.nodes("requests_running", "decode")
    return next((node for node, num_running in running.items() if num_running), None)


def _wait_for_all(project: Project, what: str) -> None:
    began_s = time.monotonic()
    wait_for(lambda: project.num_ready() == NUM_NODES, f"{NUM_NODES} nodes ready after {what}", BACK_S)
    say(f"{what}: {NUM_NODES} nodes are ready, {time.monotonic() - began_s:.1f} s later")
