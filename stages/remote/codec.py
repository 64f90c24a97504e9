"""Turns messages into bytes and back: known types only, by msgpack, and no code from data.

Scalars stand for themselves. Everything else is a list that begins with a mark: ``[LIST, ...]``,
``[TUPLE, ...]``, ``[OBJECT, "TextPrompt", "Hello", True, [DICT]]``. What is large is given to the
caller, who puts it into shared memory, an object store or wherever, and says by what reference the
other side finds it there.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from pydantic import BaseModel
from torch import Tensor

from engine.interface.outputs import (
    CompletionDelta,
    FinishReason,
    OutputDelta,
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
from prefix_cache.kv_cache.kv_cache_manager import GroupStats, KVCacheStats
from prefix_cache.stores.encoder_cache import EncoderCacheStats
from stages.remote.segments import RemoteBytes, SharedTensor, SharedTensors
from stages.stage import Completion, StageOutput, StageRequest

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["STAGE_TYPES", "Codec", "Find", "PlainType", "Share", "picture_of", "pixels_of"]

_PIXEL_BYTES = {"RGB": 3, "I": 4, "F": 4}


def pixels_of(image: Image) -> tuple[str, tuple[int, int], NDArray[np.uint8]]:
    """Mode, size and pixels of an image, upright RGB as stages make it.

    One that stages refuse, since it does not say what is white, keeps its mode: they shall tell.

    Returns:
        The mode, ``(width, height)``, and ``(width * height * bytes of a pixel,)``.

    Raises:
        ValueError: it cannot be read.
    """
    from engine.media.image_file import upright_rgb

    try:
        image.load()
    except (OSError, SyntaxError) as error:
        raise ValueError(f"an image that cannot be read: {error}") from error
    if image.mode not in ("I", "F"):
        image = upright_rgb(image)
    return image.mode, image.size, np.frombuffer(image.tobytes(), np.uint8)


def picture_of(mode: str, size: tuple[int, int], pixels: NDArray[np.uint8]) -> Image:
    """The image that :func:`pixels_of` took apart.

    Raises:
        ValueError: there are more pixels or fewer, or the mode is another.
    """
    from PIL import Image as pillow

    width, height = size
    if mode not in _PIXEL_BYTES or pixels.size != width * height * _PIXEL_BYTES[mode]:
        raise ValueError(f"{pixels.size} bytes for an image {width} x {height} of mode {mode!r}")
    return pillow.frombytes(mode, size, pixels.tobytes())


STAGE_TYPES: tuple[type, ...] = (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    Completion,
    CompletionDelta,
    EmbedsPrompt,
    EncoderCacheStats,
    EngineStats,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    GroupStats,
    ImagePrompt,
    KVCacheStats,
    OutputDelta,
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


Share: TypeAlias = "Callable[[NDArray[np.uint8] | Tensor | RemoteBytes], Any]"
"""Takes bytes, ``(n,)`` uint8, on whatever device, or what another process has placed; gives what
stands for them in the message, of None, numbers, strings, bytes and lists: or None for small ones,
which then travel in the message."""

Find: TypeAlias = "Callable[[Any], RemoteBytes | NDArray[np.uint8]]"
"""From what stands for bytes to the bytes. Raises ``ValueError`` for what stands for none."""


class _Mark(IntEnum):
    LIST = 0
    TUPLE = 1
    FLAT = 2  # a tuple of scalars, in a list of its own
    DICT = 3
    OBJECT = 4
    TENSOR = 5
    ARRAY = 6
    SCALAR = 7
    PATH = 8
    IMAGE = 9
    SET = 10
    FROZENSET = 11
    DTYPE = 12
    STRING = 13  # one that is not Unicode, such as a path of another encoding
    INTEGER = 14  # of more than 64 bits


_SCALARS = frozenset({NoneType, bool, int, float, str, bytes})
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_ARRAY_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}")
_DEEPEST = 64
"""Levels of lists, objects and the like inside of each other."""

_LARGEST_INTEGER = 1024
"""Bytes."""


class _Unsendable(ValueError):
    """Collects the way to a value while the call stack unwinds."""

    way = ""

    def beneath(self, place: str) -> _Unsendable:
        self.way = place + self.way
        return self


class Codec:
    """Encodes and decodes messages. Safe to use from any thread once its types are registered.

    Args:
        types: dataclasses, NamedTuples, enumerations and pydantic models that messages may hold,
            and no others.

    Raises:
        ValueError: a type is none of these, or two have the same name.
    """

    def __init__(self, types: Iterable[type] = STAGE_TYPES) -> None:
        self._by_type: dict[type, PlainType] = {}
        self._by_name: dict[str, PlainType] = {}
        for each in types:
            self.register(each)

    def register(self, kind: type) -> None:
        """Let messages hold objects of a type. The other side has to do so as well.

        Raises:
            ValueError: as for the constructor.
        """
        if kind in self._by_type:
            return
        plain = PlainType.of(kind)
        if plain.name in self._by_name:
            raise ValueError(f"messages know another type that is called {plain.name}")
        self._by_type[kind] = self._by_name[plain.name] = plain

    def encode(self, message: object, share: Share | None = None) -> bytes:
        """Turn a message into bytes.

        Tensors of any device and layout arrive dense, without gradients, with the same bits: on the
        CPU, or where ``find`` of the other side has what ``share`` took. Images arrive as the
        upright RGB that stages make of them.

        Args:
            message: of registered types, None, numbers, strings, bytes, paths, lists, tuples,
                sets, mappings, tensors, arrays of numbers and images of Pillow.
            share: where large content goes; None leaves all in the message.

        Raises:
            ValueError: a value of another type; the message says which, and in which field.
            Exception: whatever ``share`` raises, such as ``MemoryError``.
        """
        for is_exact in (False, True):
            try:
                return msgspec.msgpack.encode(_Writer(self._by_type, share, is_exact).put(message))
            except _Unsendable as error:
                place = f"{type(message).__name__}{error.way}"
                raise ValueError(f"{place} cannot be sent to another process: {error}") from error
            except (OverflowError, UnicodeEncodeError):
                if is_exact:
                    raise
        raise AssertionError("unreachable: the second try leaves nothing to msgpack's limits")

    def decode(self, content: bytes | memoryview, find: Find | None = None) -> Any:
        """Turn bytes into the message that they came from.

        Args:
            content: whatever came.
            find: from the references that ``share`` gave to what they stand for.

        Returns:
            The message. In it, a mapping with a tensor that was shared is a ``SharedTensors``;
            other shared tensors and arrays lie over the shared memory.

        Raises:
            ValueError: it is no message.
        """
        try:
            return _Reader(self._by_name, find).take(msgspec.msgpack.decode(content))
        except RecursionError:
            raise ValueError("a message that cannot be read: it is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"a message that cannot be read: {error}") from error


class _Writer:
    """Makes plain values of one message."""

    def __init__(
        self, types: Mapping[type, PlainType], share: Share | None, is_exact: bool
    ) -> None:
        self._types, self._share, self._is_exact = types, share, is_exact
        self._depth = 0

    def put(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return self._exact(value) if self._is_exact else value
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unsendable(f"it has more than {_DEEPEST} levels")
        plain = self._types.get(kind)
        if plain is not None:
            items = self._fields(plain, value)
        elif kind in (list, tuple, torch.Size):
            items = self._sequence(value)
        elif isinstance(value, Mapping):
            items = self._mapping(value)
        else:
            items = self._leaf(value)
        self._depth -= 1
        return items

    def _fields(self, plain: PlainType, value: Any) -> list[Any]:
        items: list[Any] = [_Mark.OBJECT, plain.name]
        for name, each in zip(plain.fields, plain.take_apart(value), strict=True):
            # Most fields are scalars, and most of the time goes into them.
            if type(each) in _SCALARS and not self._is_exact:
                items.append(each)
                continue
            try:
                items.append(self.put(each))
            except _Unsendable as error:
                raise error.beneath(f".{name}") from None
        return items

    def _sequence(self, value: list[Any] | tuple[Any, ...]) -> list[Any]:
        is_tuple = isinstance(value, tuple)
        if is_tuple and not self._is_exact and _SCALARS.issuperset(map(type, value)):
            return [_Mark.FLAT, value]
        items: list[Any] = [_Mark.TUPLE if is_tuple else _Mark.LIST]
        for index, each in enumerate(value):
            try:
                items.append(self.put(each))
            except _Unsendable as error:
                raise error.beneath(f"[{index}]") from None
        return items

    def _mapping(self, value: Mapping[Any, Any]) -> list[Any]:
        items: list[Any] = [_Mark.DICT]
        entries = value.entries if isinstance(value, SharedTensors) else value
        for key, each in entries.items():
            try:
                items += (self.put(key), self.put(each))
            except _Unsendable as error:
                raise error.beneath(f"[{key!r}]") from None
        return items

    def _leaf(self, value: Any) -> list[Any]:
        match value:
            case Tensor():
                return self._tensor(value)
            case SharedTensor():
                return self._shared(value)
            case np.ndarray():
                return self._array(value)
            case np.generic():
                return [_Mark.SCALAR, self._array(np.asarray(value))]
            case Path():
                return [_Mark.PATH, os.fsencode(value)]
            case Image():
                return self._image(value)
            case set() | frozenset():
                mark = _Mark.SET if isinstance(value, set) else _Mark.FROZENSET
                return [mark, *map(self.put, value)]
            case torch.dtype():
                return [_Mark.DTYPE, str(value).removeprefix("torch.")]
        kind = type(value)
        raise _Unsendable(
            f"it is of type {kind.__module__}.{kind.__qualname__}, which messages do not know"
        )

    def _exact(self, value: Any) -> Any:
        """A scalar that msgpack may not be able to tell."""
        if type(value) is int and not -(2**63) <= value < 2**64:
            size = value.bit_length() // 8 + 1
            if size > _LARGEST_INTEGER:
                raise _Unsendable(f"it is an integer of {size} bytes")
            return [_Mark.INTEGER, value.to_bytes(size, "little", signed=True)]
        if type(value) is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                return [_Mark.STRING, value.encode("utf-8", "surrogatepass")]
        return value

    def _tensor(self, value: Tensor) -> list[Any]:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise _Unsendable(f"it is a tensor of {value.dtype}, {value.layout}, {value.device}")
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        # What has one element or none passes for contiguous with any stride.
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return [_Mark.TENSOR, dtype, shape, self._bytes(flat)]

    def _shared(self, value: SharedTensor) -> list[Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        return [_Mark.TENSOR, dtype, list(value.shape), self._bytes(value.source)]

    def _array(self, value: NDArray[Any]) -> list[Any]:
        if not _ARRAY_DTYPE.fullmatch(value.dtype.str):
            raise _Unsendable(f"it is an array of {value.dtype}, and arrays must be of numbers")
        # Not numpy.ascontiguousarray, which gives what has no dimensions one.
        dense = np.asarray(value, order="C").reshape(-1).view(np.uint8)
        return [_Mark.ARRAY, value.dtype.str, list(value.shape), self._bytes(dense)]

    def _image(self, value: Image) -> list[Any]:
        try:
            mode, size, pixels = pixels_of(value)
        except ValueError as error:
            raise _Unsendable(str(error)) from error
        return [_Mark.IMAGE, mode, *size, self._bytes(pixels)]

    def _bytes(self, content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Any:
        """The reference that ``share`` gave, in a list, or the content."""
        reference = None if self._share is None else self._share(content)
        if reference is not None:
            return [reference]
        if isinstance(content, RemoteBytes):
            content = content.array()
        return (content.cpu().numpy() if isinstance(content, Tensor) else content).tobytes()


class _Reader:
    """Makes a message of plain values, which may be anything that msgpack can tell."""

    def __init__(self, types: Mapping[str, PlainType], find: Find | None) -> None:
        self._types, self._find = types, find
        self._depth = 0

    def take(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        if type(value) is not list or not value or type(value[0]) is not int:
            raise ValueError(f"a {type(value).__name__} in the place of a marked list")
        mark, *items = value
        make = self._MAKERS.get(mark)
        if make is None:
            raise ValueError(f"unknown mark {mark}")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"it has more than {_DEEPEST} levels")
        try:
            made = make(self, *items)
        except (ValueError, MemoryError):
            raise
        except Exception as error:  # the values are of other types or numbers than they must be
            raise ValueError(f"{_Mark(mark).name}: {error}") from error
        self._depth -= 1
        return made

    def _items(self, *items: Any) -> list[Any]:
        return [each if type(each) in _SCALARS else self.take(each) for each in items]

    def _tuple(self, *items: Any) -> tuple[Any, ...]:
        return tuple(self._items(*items))

    def _flat(self, items: object) -> tuple[Any, ...]:
        if not isinstance(items, list) or not _SCALARS.issuperset(map(type, items)):
            raise ValueError("a tuple of scalars holds something else")
        return tuple(items)

    def _dict(self, *items: Any) -> Mapping[Any, Any]:
        if len(items) % 2:
            raise ValueError("a mapping has a key without a value")
        keys = self._items(*items[::2])
        # A tensor that is shared stays a handle here, and only here.
        values = [self._handle(each) for each in items[1::2]]
        made = dict(zip(keys, values, strict=True))
        is_shared = any(isinstance(each, SharedTensor) for each in values)
        if is_shared and all(isinstance(each, SharedTensor | Tensor) for each in values):
            return SharedTensors(made)
        return {
            key: each.tensor() if isinstance(each, SharedTensor) else each
            for key, each in made.items()
        }

    def _handle(self, value: Any) -> Any:
        if type(value) is list and value[:1] == [_Mark.TENSOR]:
            return self._tensor_or_handle(*value[1:])
        return self.take(value)

    def _object(self, name: str, *values: Any) -> Any:
        plain = self._types.get(name)
        if plain is None:
            raise ValueError(f"unknown type {name!r:.80}")
        if len(values) != len(plain.fields):
            raise ValueError(f"{name} has {len(plain.fields)} fields, and {len(values)} came")
        try:
            return plain.make(*self._items(*values))
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from error

    def _tensor(self, dtype: str, shape: list[int], content: Any) -> Tensor:
        made = self._tensor_or_handle(dtype, shape, content)
        return made.tensor() if isinstance(made, SharedTensor) else made

    def _tensor_or_handle(self, name: str, shape: list[int], content: Any) -> Tensor | SharedTensor:
        sides, dtype = _sides(shape), _DTYPES[name]
        found = self._content(content)
        if isinstance(found, RemoteBytes):
            return SharedTensor(found, dtype, sides)
        if len(found) != math.prod(sides) * dtype.itemsize:
            raise ValueError(f"{len(found)} bytes for a tensor {sides} of {dtype}")
        return torch.from_numpy(found).view(dtype).view(sides)

    def _array(self, name: str, shape: list[int], content: Any) -> NDArray[Any]:
        sides = _sides(shape)
        if not _ARRAY_DTYPE.fullmatch(name):
            raise ValueError(f"an array of {name!r}")
        made: NDArray[Any] = self._flat_bytes(content).view(np.dtype(name)).reshape(sides)
        return made

    def _flat_bytes(self, content: Any) -> NDArray[np.uint8]:
        found = self._content(content)
        return found.array() if isinstance(found, RemoteBytes) else found

    def _content(self, content: Any) -> RemoteBytes | NDArray[np.uint8]:
        """What is in the message, as the receiver's own, or what its reference stands for."""
        if type(content) is bytes:
            return np.frombuffer(bytearray(content), np.uint8)
        if type(content) is not list or len(content) != 1 or self._find is None:
            raise ValueError(f"neither bytes nor a reference: {content!r:.80}")
        return self._find(content[0])

    def _image(self, mode: str, width: int, height: int, content: Any) -> Image:
        return picture_of(mode, (width, height), self._flat_bytes(content))

    def _set(self, *items: Any) -> set[Any]:
        return set(self._items(*items))

    _MAKERS: Mapping[int, Callable[..., Any]] = {
        _Mark.LIST: _items,
        _Mark.TUPLE: _tuple,
        _Mark.FLAT: _flat,
        _Mark.DICT: _dict,
        _Mark.OBJECT: _object,
        _Mark.TENSOR: _tensor,
        _Mark.ARRAY: _array,
        _Mark.SCALAR: lambda self, array: self.take(array)[()],
        _Mark.PATH: lambda self, path: Path(os.fsdecode(_bytes_of(path))),
        _Mark.IMAGE: _image,
        _Mark.SET: _set,
        _Mark.FROZENSET: lambda self, *items: frozenset(self._items(*items)),
        _Mark.DTYPE: lambda self, name: _DTYPES[name],
        _Mark.STRING: lambda self, text: _bytes_of(text).decode("utf-8", "surrogatepass"),
        _Mark.INTEGER: lambda self, number: _integer(_bytes_of(number)),
    }


def _sides(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"no shape: {shape!r:.80}")
    return tuple(shape)


def _bytes_of(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a {type(value).__name__} in the place of bytes")
    return value


def _integer(content: bytes) -> int:
    if len(content) > _LARGEST_INTEGER:
        raise ValueError(f"an integer of {len(content)} bytes")
    return int.from_bytes(content, "little", signed=True)
