"""Configs of transformers without transformers' activations.

Some configs check their fields with ``transformers.utils.type_validators``, which wants the table
of activations, which imports torch's compiler and distributed tensors: more than a second of a
start, for a table that few configs look into. Here the validators are imported with a table that
is filled when it is first looked into.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

__all__ = ["import_validators"]

_PACKAGE = "transformers"
_ACTIVATIONS = f"{_PACKAGE}.activations"
_VALIDATORS = f"{_PACKAGE}.utils.type_validators"


class _LateTable(Mapping[str, Any]):
    """The table of activations, imported when it is first looked into."""

    def __getitem__(self, name: str) -> Any:
        return _real().ACT2FN[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_real().ACT2FN)

    def __len__(self) -> int:
        return len(_real().ACT2FN)

    def __contains__(self, name: object) -> bool:
        return name in _real().ACT2FN


class _Stand(ModuleType):
    """Stands for the module while the validators are imported; knows all that the module does."""

    ACT2FN = _LateTable()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of any module
            raise AttributeError(name)
        return getattr(_real(), name)


@cache
def _real() -> Any:
    if isinstance(sys.modules.get(_ACTIVATIONS), _Stand):
        del sys.modules[_ACTIVATIONS]
    return importlib.import_module(_ACTIVATIONS)


def import_validators() -> None:
    """Import transformers' validators, without its activations if nothing has imported them.

    What is imported elsewhere meanwhile, or later, gets the real module.
    """
    if _VALIDATORS in sys.modules or _ACTIVATIONS in sys.modules:
        return
    stand = sys.modules[_ACTIVATIONS] = _Stand(_ACTIVATIONS)
    try:
        importlib.import_module(_VALIDATORS)
    finally:
        if sys.modules.get(_ACTIVATIONS) is stand:
            del sys.modules[_ACTIVATIONS]
