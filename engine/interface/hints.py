"""Type hints for types that need torch, which can be resolved without it.

A decoder reads the hints of messages at run time. To type checkers these names are the types
themselves; at run time they are classes that everything is an instance of, and that tell the
decoder what to build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor as Tensor

    from engine.interface.prompts import Prompt

    AnyPrompt: TypeAlias = Prompt
    Tensors: TypeAlias = Mapping[str, Tensor]
else:

    class _Hint(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return True

    class AnyPrompt(metaclass=_Hint):
        """Any form of prompt."""

    class Tensor(metaclass=_Hint):
        """A tensor."""

    class Tensors(metaclass=_Hint):
        """Tensors by name, mapped into memory on access."""
