"""One line that tells how far a load is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from splitserve.commands.terminal import stderr, waiting
from splitserve_bench.serve.target import Progress

NUM_LINES: Final = 10  # of a whole load, where there is no terminal


@contextmanager
def shown_progress(label: str) -> Iterator[Callable[[Progress], None]]:
    """A line that changes; without a terminal a new one for each tenth of the load."""
    with waiting(f"{label}: connecting") as show:
        shown = 0

        def tell(progress: Progress) -> None:
            nonlocal shown
            if not stderr.is_terminal:
                num_ended = progress.num_completed + progress.num_failed
                tenth = num_ended * NUM_LINES // (progress.num_planned or 1)
                if tenth == shown:
                    return
                shown = tenth
            show(f"{label}: {progress_text(progress)}")

        yield tell


def progress_text(progress: Progress) -> str:
    """Counts, seconds and rates since the start."""
    elapsed_s = progress.elapsed_s or 1.0
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    return (
        f"{progress.num_completed} of {progress.num_planned} done{failed}, {progress.num_in_flight} under way, "
        f"{progress.elapsed_s:.1f} s, {progress.num_completed / elapsed_s:.2f} requests/s, "
        f"{progress.num_output_tokens / elapsed_s:.1f} tokens/s"
    )
