"""`python -m decode_node MODEL`: one decode node process."""

from decode_node.settings import DecodeSettings
from protos.serving import run_node
from serving_core.flags import settings_command


def run(settings: DecodeSettings) -> None:
    """Runs until SIGTERM."""
    run_node("decode", settings, lambda name: _serve(settings, name))


async def _serve(settings: DecodeSettings, name: str) -> None:
    from decode_node.server import serve_decode  # imports torch, which counts the cores it may use

    await serve_decode(settings, name)


main = settings_command(DecodeSettings, run, name="decode", help="Run one decode node.")

if __name__ == "__main__":
    main()
