"""Takes the pictures of docs/watching.md: the demo model on this machine under some load, while a node is drained and
takes answers again.

    .venv/bin/python -m tests.system.ui_pictures
"""

import asyncio
import contextlib
import io
import random
import tempfile
from pathlib import Path

import httpx2
from PIL import Image

from splitserve import AsyncClient
from tests.system.browser import browser
from tests.system.cluster import Child, free_port, wait_until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DEADLINE_S = 300.0
LOAD_S = 75.0
NUM_ASKING = 6
SUBJECTS = ("rivers", "bridges", "clouds", "maps", "lighthouses", "clocks", "gardens", "trains", "glass", "salt")
QUESTION = "Why do lighthouses flash in different patterns? Answer in three sentences."
SLO_CLASSES = ("chat=ttft:1500,tpot:150", "batch=tpot:400,priority:10")
NUM_COLORS = 200


async def ask(client: httpx2.AsyncClient, rng: random.Random, number: int) -> None:
    """One answer after the other."""
    while True:
        subject, slo_class = rng.choice(SUBJECTS), rng.choice(("chat", "batch"))
        notes = f"Note {rng.randrange(1000)}: {subject} matter to {rng.choice(SUBJECTS)}. " * rng.randrange(1, 25)
        body = {
            "messages": [{"role": "user", "content": f"{notes}Tell me about {subject}."}],
            "max_tokens": rng.randrange(24, 160),
            "slo_class": slo_class,
        }
        headers = {"x-request-id": f"{slo_class}-{number}-{rng.randrange(10**4):04d}"}
        await client.post("/v1/chat/completions", json=body, headers=headers)
        await asyncio.sleep(rng.uniform(0.0, 2.0))


async def load(url: str, target: str, seconds: float) -> None:
    """So many ask for so long; meanwhile a node is drained, and takes answers again."""
    rng = random.Random(5)
    async with httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, AsyncClient(target) as admin:
        asking = [asyncio.create_task(ask(client, rng, number)) for number in range(NUM_ASKING)]
        await asyncio.sleep(seconds * 0.7)
        async for _ in admin.drain("decode-1"):
            pass
        await admin.set_role("decode-1", "decode")
        await asyncio.sleep(seconds * 0.3)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def save(picture: bytes, name: str) -> None:
    """With as few colours as do: a page has few."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
    image.save(IMAGES / name, optimize=True)


def main() -> None:
    grpc_port, http_port = free_port(), free_port()
    url = f"http://127.0.0.1:{http_port}"
    with tempfile.TemporaryDirectory(prefix="splitserve-pictures-") as folder, browser() as page:
        flags = {"grpc_port": grpc_port, "http_port": http_port, "decode": 2, "slo_class": SLO_CLASSES}
        up = Child("up", "splitserve", "up", flags=flags, log=Path(folder) / "log", env={})
        try:
            wait_until(lambda: "Ready" in up.output() or not up.is_running, "it serves", DEADLINE_S)
            page.open(f"{url}/ui", width=1440, height=1080)
            with contextlib.suppress(TimeoutError):
                asyncio.run(load(url, f"127.0.0.1:{grpc_port}", LOAD_S))
            page.ask("document.getElementById('question').focus()")
            page.write(QUESTION)
            page.press("Enter")
            page.until("document.querySelector('.spent[data-end]:not([data-end=\"\"])')", DEADLINE_S)
            for is_dark, name in ((False, "ui-light.png"), (True, "ui-dark.png")):
                page.darken(is_dark)
                save(page.picture(), name)
            assert not page.problems, page.problems
        finally:
            assert up.stop(60.0) == 0, up.output()


if __name__ == "__main__":
    main()
