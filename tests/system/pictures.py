"""Takes the pictures of the fleet page and of a request's timeline, in light and dark: the demo model on this machine
under some load, while a node is drained and takes requests again.

    .venv/bin/python -m tests.system.pictures
"""

import asyncio
import io
import random
import tempfile
import threading
import time
from pathlib import Path

import httpx2
from PIL import Image

from splitserve import AsyncClient
from tests.system.browser import Page, browser
from tests.system.cluster import Child, free_port, wait_until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DEADLINE_S = 300.0
BEFORE_S, AFTER_S = 50.0, 15.0  # of load, before a node is drained and after
NUM_ASKING = 5
SUBJECTS = ("rivers", "bridges", "clouds", "maps", "lighthouses", "clocks", "gardens", "trains", "glass", "salt")
QUESTION = "Why do lighthouses flash in different patterns? Answer in three sentences."
CHOSEN = "#requests tr[data-sequence^=ui-] button"  # the request of the page's chat
SLO_CLASSES = ("chat=ttft:1500,tpot:150", "batch=tpot:400,priority:10")


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


async def load(url: str, target: str, seen: threading.Event) -> None:
    """So many ask until it has been seen; meanwhile a node is drained, and takes answers again."""
    rng = random.Random(5)
    async with httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S) as client, AsyncClient(target) as admin:
        asking = [asyncio.create_task(ask(client, rng, number)) for number in range(NUM_ASKING)]
        await asyncio.sleep(BEFORE_S)
        async for _ in admin.drain("decode-1"):
            pass
        await admin.set_role("decode-1", "decode")
        while not seen.is_set():
            await asyncio.sleep(0.1)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def save(picture: bytes, name: str) -> None:
    """With 256 colours, a third of the bytes."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    few = image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(IMAGES / name, optimize=True)


def save_both(page: Page, name: str, selector: str = "") -> None:
    """In light and dark."""
    for is_dark, scheme in ((False, "light"), (True, "dark")):
        page.darken(is_dark)
        save(page.picture(selector), f"{name}-{scheme}.png")


def main() -> None:
    grpc_port, http_port = free_port(), free_port()
    url, seen = f"http://127.0.0.1:{http_port}", threading.Event()
    with tempfile.TemporaryDirectory(prefix="splitserve-pictures-") as folder, browser() as page:
        flags = {"grpc_port": grpc_port, "http_port": http_port, "decode": 2, "slo_class": SLO_CLASSES}
        up = Child("up", "splitserve", "up", flags=flags, log=Path(folder) / "log", env={})
        loading = threading.Thread(target=lambda: asyncio.run(load(url, f"127.0.0.1:{grpc_port}", seen)))
        try:
            wait_until(lambda: "Ready" in up.output() or not up.is_running, "it serves", DEADLINE_S)
            page.open(f"{url}/ui", width=1440, height=1090)
            loading.start()
            time.sleep(BEFORE_S + AFTER_S)
            page.ask("document.getElementById('question').focus()")
            page.write(QUESTION)
            page.press("Enter")
            page.until("document.querySelector('.spent[data-end]:not([data-end=\"\"])') !== null", DEADLINE_S)
            save_both(page, "ui")
            page.ask(f"document.querySelector('{CHOSEN}').click()")
            page.until("document.getElementById('request').firstChild !== null")
            save_both(page, "timeline", "#request")
            assert not page.problems, page.problems
        finally:
            seen.set()
            loading.join(DEADLINE_S)
            assert up.stop(60.0) == 0, up.output()


if __name__ == "__main__":
    main()
