"""Converts docstring roles to Markdown, for the Python reference."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|attr|data|exc|mod):`(~?)([^`<]+)`")
_LITERAL = re.compile(r"::[ \t]*(?=\n)")
_SESSION = re.compile(r"^((?:>>>|\.\.\.) .*(?:\n(?:>>>|\.\.\.) .*)*)", re.M)


class DocstringRoles(Extension):
    """Converts each docstring when its object is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """See :class:`griffe.Extension`."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Convert roles to names, ``::`` to a colon, and interactive sessions to fenced blocks."""
    named = _ROLE.sub(lambda role: f"`{_name(*role.groups())}`", text)
    plain = _LITERAL.sub(":", named).replace("``", "`")
    return _SESSION.sub(lambda session: f"```pycon\n{session[1]}\n```", plain)


def _name(shortened: str, path: str) -> str:
    return path.rpartition(".")[2] if shortened else path
