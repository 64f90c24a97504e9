"""Encodes the messages between processes, and decodes them by the types of their fields.

A message is a tagged ``msgspec`` struct; a new kind is one more type in the decoder's union. Types
that msgspec does not know are MessagePack extensions::

    code      content
    TENSOR    [dtype, shape, bytes or Reference]
    ARRAY     [dtype, shape, bytes or Reference]
    IMAGE     [mode, [width, height], bytes or Reference]
    PATH      bytes
    SAMPLING  the fields of SamplingParams that were set

Large content is passed to the caller, who puts it into shared memory or an object store and returns
the :class:`Reference` by which the other side finds it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import engine.interface.outputs as stats
import engine.interface.prompts as prompts
from engine.interface import hints
from engine.interface.sampling_params import SamplingParams
from engine.interface.structured_output import StructuredOutput
from prefix_cache import KVCacheStats, OffloadStats
from stages.remote.shared_memory import RemoteBytes, SharedTensor, SharedTensors

# Type hints that their module imports for type checkers only, resolved by msgspec at run time.
vars(stats).update(KVCacheStats=KVCacheStats, OffloadStats=OffloadStats)


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Location of content outside of the message.

    Attributes:
        number: index of a shared memory segment or object that accompanies the message.
        offset: first byte in the segment.
    """

    number: int
    nbytes: int
    offset: int = 0


INLINE_BYTES = 64 * 2**10
"""Size up to which a copy in the message is cheaper than a separate segment or object."""


Share: TypeAlias = "Callable[[NDArray[np.uint8] | Tensor | RemoteBytes], Reference | None]"
"""Accepts content, ``(n,)`` uint8, on any device, or bytes that another process has placed; returns
None for content that is to be sent in the message."""

Find: TypeAlias = "Callable[[Reference], RemoteBytes]"
"""Resolves a reference; raises ``ValueError`` if it refers to nothing."""

_Bytes: TypeAlias = "NDArray[np.uint8] | RemoteBytes"
_TENSOR, _ARRAY, _IMAGE, _PATH, _SAMPLING = range(1, 6)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_PIXEL_BYTES = {"RGB": 3, "I": 4, "F": 4}


class _Block(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    shape: tuple[int, ...]
    content: bytearray | Reference


class _UnsendableError(TypeError):
    def __init__(self, value: object, reason: str) -> None:
        super().__init__(reason)
        self.value = value


def encode(message: object, share: Share | None = None) -> bytes:
    """Encode a message. Thread-safe.

    Tensors of any device and strides arrive dense, without gradients, with the same bits: on the
    CPU, or wherever the receiver's ``find`` has the content that ``share`` stored. Images arrive as
    upright RGB, which is what stages convert them to.

    Args:
        message: made of structs, dataclasses, enums, numbers, text, bytes, paths, lists, tuples,
            mappings, tensors, numeric arrays, Pillow images and ``SamplingParams``.
        share: stores large content; None keeps everything in the message.

    Raises:
        ValueError: part of it cannot be sent; the message names the value and its field.
        Exception: whatever ``share`` raises, such as ``MemoryError``.
    """
    try:
        return msgspec.msgpack.encode(message, enc_hook=_Writer(share).put)
    except _UnsendableError as error:
        culprit, reason = error.value, str(error)
        place = _path_to(message, lambda value: value is culprit)
    except RecursionError:
        place, reason = "", "it is nested too deeply"
    except (OverflowError, UnicodeEncodeError) as error:
        place, reason = _path_to(message, _is_beyond_msgpack), str(error)
    raise ValueError(
        f"{type(message).__name__}{place or ''} cannot be sent to another process: {reason}"
    )


def _is_beyond_msgpack(value: object) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _path_to(value: object, is_culprit: Callable[[object], bool]) -> str | None:
    """Return the path to a part of a message, such as ``.prompt.messages[0]['content']``."""
    if is_culprit(value):
        return ""
    for step, part in _parts(value):
        path = _path_to(part, is_culprit)
        if path is not None:
            return f"{step}{path}"
    return None


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    names: tuple[str, ...] = getattr(value, "__struct_fields__", ())
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
    yield from ((f".{name}", getattr(value, name)) for name in names)
    if isinstance(value, Mapping) and not isinstance(value, SharedTensors):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))


class _Writer:
    """Encodes types that msgspec does not know."""

    def __init__(self, share: Share | None) -> None:
        self._share = share

    def put(self, value: Any) -> Any:
        match value:
            case Tensor():
                return self._tensor(value)
            case SharedTensor():
                return self._block(_TENSOR, _dtype_name(value.dtype), value.shape, value.source)
            case SharedTensors():
                return dict(value.entries)
            case Mapping():
                return dict(value)
            case np.ndarray():
                return self._array(value)
            case np.bool_() | np.integer() | np.floating() if value.dtype.itemsize <= 8:
                return value.item()
            case Path():
                return msgspec.msgpack.Ext(_PATH, os.fsencode(value))
            case SamplingParams():  # fields left unset stay unset
                given = {name: getattr(value, name) for name in value.model_fields_set}
                content = msgspec.msgpack.encode(given, enc_hook=self.put)
                return msgspec.msgpack.Ext(_SAMPLING, content)
            case StructuredOutput():
                return value.model_dump(exclude_defaults=True)
            case Image.Image():
                return self._image(value)
            case torch.dtype():
                return _dtype_name(value)
        kind = type(value)
        raise _UnsendableError(value, f"it is of type {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: Tensor) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            reason = f"it is a tensor of {value.dtype}, {value.layout}, {value.device}"
            raise _UnsendableError(value, reason)
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        # A tensor of at most one element counts as contiguous with any stride.
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        return self._block(_TENSOR, _dtype_name(value.dtype), value.shape, flat)

    def _array(self, value: NDArray[Any]) -> Any:
        if value.dtype.kind not in "biufc":
            raise _UnsendableError(value, f"it is an array of {value.dtype}, and not of numbers")
        # Not numpy.ascontiguousarray, which turns 0-dimensional arrays into 1-dimensional ones.
        flat = np.asarray(value, order="C").reshape(-1).view(np.uint8)
        return self._block(_ARRAY, value.dtype.str, value.shape, flat)

    def _image(self, value: Image.Image) -> Any:
        from engine.media.image_file import upright_rgb

        try:
            value.load()
        except (OSError, SyntaxError) as error:
            raise _UnsendableError(value, f"an image that cannot be read: {error}") from error
        # These modes do not define white, so stages refuse them; let the stage report it.
        image = value if value.mode in ("I", "F") else upright_rgb(value)
        pixels = np.frombuffer(image.tobytes(), np.uint8)
        return self._block(_IMAGE, image.mode, image.size, pixels)

    def _block(
        self, code: int, kind: str, shape: tuple[int, ...], content: _Bytes | Tensor
    ) -> msgspec.msgpack.Ext:
        place: Reference | None = None if self._share is None else self._share(content)
        block = (kind, tuple(shape), plain_bytes(content).data if place is None else place)
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(block))


def plain_bytes(content: _Bytes | Tensor) -> NDArray[np.uint8]:
    """Return content as an array in this process's memory."""
    if isinstance(content, RemoteBytes):
        return content.array()
    return content.cpu().numpy() if isinstance(content, Tensor) else content


class Decoder:
    """Decodes messages, in one thread at a time.

    Args:
        kinds: the message type, or a union of types.
        find: resolves references; None if nothing is shared.
    """

    def __init__(self, kinds: Any, find: Find | None = None) -> None:
        self._find = find
        self._message = msgspec.msgpack.Decoder(kinds, dec_hook=_convert, ext_hook=self._extension)
        self._block = msgspec.msgpack.Decoder(_Block)

    def decode(self, content: bytes | memoryview) -> Any:
        """Decode a message.

        Returns:
            The message. Shared ``Tensors`` in it are a ``SharedTensors``; other shared tensors and
            arrays are views of the shared memory.

        Raises:
            ValueError: the content is no message of these types.
        """
        try:
            return self._message.decode(content)
        except RecursionError:
            raise ValueError("a message that cannot be read: it is nested too deeply") from None
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"a message that cannot be read: {error}") from error

    def _extension(self, code: int, content: memoryview) -> Any:
        if code == _PATH:
            return Path(os.fsdecode(bytes(content)))
        if code == _SAMPLING:
            return SamplingParams(**msgspec.msgpack.decode(content))
        block = self._block.decode(content)
        if isinstance(block.content, bytearray):
            return _DECODERS[code](block, np.frombuffer(block.content, np.uint8))
        if self._find is None:
            raise ValueError("a reference, and nothing is shared")
        return _DECODERS[code](block, self._find(block.content))


def _tensor(block: _Block, content: _Bytes) -> Tensor | SharedTensor:
    dtype = _DTYPES[block.kind]
    if isinstance(content, RemoteBytes):
        return SharedTensor(content, dtype, block.shape)
    return torch.from_numpy(content).view(dtype).view(block.shape)


def _array(block: _Block, content: _Bytes) -> NDArray[Any]:
    dtype = np.dtype(block.kind)
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {block.kind}")
    return plain_bytes(content).view(dtype).reshape(block.shape)


def _image_of(block: _Block, content: _Bytes) -> Image.Image:
    width, height = block.shape
    if content.nbytes != width * height * _PIXEL_BYTES[block.kind]:
        raise ValueError(f"{content.nbytes} bytes for an image of {block.shape}, {block.kind}")
    return Image.frombytes(block.kind, (width, height), plain_bytes(content).tobytes())


_DECODERS: Mapping[int, Callable[[_Block, _Bytes], Any]] = {
    _TENSOR: _tensor,
    _ARRAY: _array,
    _IMAGE: _image_of,
}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _convert(hint: Any, value: Any) -> Any:
    """Convert the value of a field whose type msgspec does not know."""
    if hint is hints.Tensors:
        is_shared = any(isinstance(each, SharedTensor) for each in value.values())
        return SharedTensors(value) if is_shared else value
    return _convert_prompt(value) if hint in (hints.AnyPrompt, hints.Tensor) else value


_PROMPTS: Mapping[tuple[str, ...], type] = {
    tuple(field.name for field in dataclasses.fields(kind)): kind
    for kind in vars(prompts).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
"""Prompt classes by their field names, which are unique per class."""


def _convert_prompt(value: Any) -> Any:
    """Convert a prompt, or a part of one, whose types may be wrong.

    The engine then refuses it with the same message as a prompt from its own process.
    """
    match value:
        case SharedTensor():
            return value.tensor()
        case [int(), *_] | []:
            return tuple(value)
        case list():
            return tuple(map(_convert_prompt, value))
        case dict() if (kind := _PROMPTS.get(tuple(value))) is not None:
            return kind(**{name: _convert_prompt_field(name, each) for name, each in value.items()})
    return value


def _convert_prompt_field(name: str, value: Any) -> Any:
    if name == "multi_modal_data" and isinstance(value, dict):
        return {modality: _convert_prompt(items) for modality, items in value.items()}
    if name == "messages" and isinstance(value, list):  # plain mappings, not prompts
        return tuple(value)
    return _convert_prompt(value)
