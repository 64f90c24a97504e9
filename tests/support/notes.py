"""A message type for tests of message transports."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.interface.hints import Tensor
from stages.stage_output import StageOutput


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Carries values of any type that msgspec knows by itself, arrays, tensors and outputs."""

    value: Any = None
    tensors: tuple[Tensor, ...] = ()
    outputs: tuple[StageOutput, ...] = ()
