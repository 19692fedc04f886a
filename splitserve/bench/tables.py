"""How figures are laid out for people."""

from rich.table import Table


def plain_table(*words: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in words:
        table.add_column(title)
    for title in numbers:
        table.add_column(title, justify="right")
    return table
