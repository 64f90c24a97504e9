"""The types that may cross between processes, and how an object of each is taken apart and made."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from engine.interface.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    TokenLogprobs,
    WindowStart,
)
from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
    VideoFeatures,
    VideoPrompt,
)
from engine.interface.sampling_params import SamplingParams
from engine.interface.stats import EngineStats
from engine.interface.waveform import Waveform
from prefix_cache.kv_cache.kv_cache_stats import GroupStats, KVCacheStats
from prefix_cache.stores.encoder_cache import EncoderCacheStats
from stages.stage import Completion, StageOutput, StageRequest

__all__ = ["STAGE_TYPES", "PlainType"]

STAGE_TYPES: tuple[type, ...] = (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    Completion,
    CompletionOutput,
    EmbedsPrompt,
    EncoderCacheStats,
    EngineStats,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    GroupStats,
    ImagePrompt,
    KVCacheStats,
    RequestMetrics,
    SamplingParams,
    SpeechPrompt,
    StageOutput,
    StageRequest,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    VideoFeatures,
    VideoPrompt,
    Waveform,
    WindowStart,
)
"""What stages take and give."""


@dataclass(frozen=True, slots=True)
class PlainType:
    """A type whose objects are fully told by some plain values.

    Attributes:
        name: that stands for it in messages.
        fields: names of the values, in order.
        take_apart: from an object to the values.
        make: from the values to an object; raises whatever it likes if they are wrong.
    """

    name: str
    fields: tuple[str, ...]
    take_apart: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]

    @classmethod
    def of(cls, kind: type) -> PlainType:
        """Look at a dataclass, a NamedTuple, an enumeration or a pydantic model.

        Raises:
            ValueError: it is none of these, or has fields that its constructor does not take.
        """
        if not isinstance(kind, type):
            raise ValueError(f"a type is registered for messages, got {kind!r}")
        if issubclass(kind, Enum):
            return cls(kind.__name__, ("value",), lambda member: (member.value,), kind)
        if issubclass(kind, BaseModel):
            return cls(kind.__name__, ("fields",), _fields_set, lambda fields: kind(**fields))
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            names = typing.cast(tuple[str, ...], kind._fields)
            return cls(kind.__name__, names, tuple, kind)
        if dataclasses.is_dataclass(kind):
            return cls._of_dataclass(kind)
        raise ValueError(
            f"{kind.__name__} cannot be registered for messages: it must be a dataclass, a "
            "NamedTuple, an Enum or a pydantic model"
        )

    @classmethod
    def _of_dataclass(cls, kind: type) -> PlainType:
        fields = dataclasses.fields(kind)
        hidden = [field.name for field in fields if not field.init]
        if hidden:
            raise ValueError(
                f"{kind.__name__} cannot be registered for messages: its constructor does not take "
                f"{', '.join(hidden)}"
            )
        names = tuple(field.name for field in fields)

        def take_apart(value: Any) -> tuple[Any, ...]:
            return tuple([getattr(value, name) for name in names])

        def make(*values: Any) -> Any:
            return kind(**dict(zip(names, values, strict=True)))

        return cls(kind.__name__, names, take_apart, make)


def _fields_set(model: BaseModel) -> tuple[dict[str, Any]]:
    """What the model was given; the rest is made by its defaults, as it was here."""
    return ({name: getattr(model, name) for name in model.model_fields_set},)
