"""Test cases as a table in text, one row per line, which is easier to read than nested tuples."""

from __future__ import annotations


def rows(table: str, divider: str = " | ") -> list[tuple[str, ...]]:
    """Return the cells of each line, stripped; one may be empty.

    A line that ends in a backslash continues on the next one.
    """
    joined = table.replace("\\\n", "").strip()
    lines = (line.strip() for line in joined.splitlines())
    return [tuple(cell.strip() for cell in f" {line} ".split(divider)) for line in lines]
