"""Processes that may open few files."""


def limited(argv: list[str], soft: int, hard: int) -> list[str]:
    """The command, run within these limits. By a shell and not in the forked child of this process: there gRPC starts
    threads of its own, on descriptors that are closed."""
    return ["sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh", *argv]
