"""How every table for people looks."""

from rich.table import Table


def plain_table(title: str, *columns: str) -> Table:
    """An empty table without lines; words that are too long are folded."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
