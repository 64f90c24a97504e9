"""Types that need torch, as hints which can be looked up without it.

A decoder reads the hints of messages at run time. To type checkers these names are the types
themselves; at run time they are classes that everything is an instance of, and by which the decoder
knows what to make.
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
        """Tensors by their names, which are mapped when they are asked for."""
