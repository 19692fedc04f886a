"""`python -m prefill_node MODEL`: one prefill node process."""

from prefill_node.settings import PrefillSettings
from protos.serving import run_node
from serving_core.flags import settings_command


def run(settings: PrefillSettings) -> None:
    """Runs until SIGTERM."""
    run_node("prefill", settings, lambda name: _serve(settings, name))


async def _serve(settings: PrefillSettings, name: str) -> None:
    from prefill_node.server import serve_prefill  # imports torch, which counts the cores it may use

    await serve_prefill(settings, name)


main = settings_command(PrefillSettings, run, name="prefill", help="Run one prefill node.")

if __name__ == "__main__":
    main()
