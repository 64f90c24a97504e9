"""Code blocks of the README and the documentation's pages."""

from __future__ import annotations

import re

from tests.support.import_graph import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(language: str) -> list[tuple[str, str]]:
    """Return the code blocks of a language in the README and then in all pages, with file names."""
    return [
        (page.name, block)
        for page in (README, *PAGES)
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)
    ]


def commands() -> list[str]:
    """Return the commands of their shell blocks, each once, without comments."""
    blocks = "".join(block for _, block in snippets("bash")).replace("\\\n", " ")
    lines = (re.sub(r"\s+# .*", "", line).strip() for line in blocks.splitlines())
    return sorted({line for line in lines if line and not line.startswith('"')})
