"""A fake CUDA device, computed on the CPU under CUDA's rules, with every crossing recorded.

A tensor "on cuda:0" wraps one on the CPU. Mixing tensors of both devices in one operation raises,
as on CUDA, where only host scalars may mix. Counted by the line of the project that caused them:

- uploads and reads, and of these the ones that block the host until the device is done;
- waits for a stream.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.attention import triton_backend
from engine.llm import llm_engine
from tests.support.called_graphs import CalledGraphs
from tests.support.import_graph import LAYERS, ROOT
from tests.support.interpreted_triton import need_interpreter

CUDA = torch.device("cuda:0")


@dataclass
class Crossings:
    """Transfers between host and device since the last :meth:`clear`: kind and source line."""

    places: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def note(self, kind: str) -> None:
        """Count a crossing at the innermost line of the project."""
        self.places[kind][_place()] += 1

    def count(self, *kinds: str) -> int:
        """Return the number of crossings of these kinds."""
        return sum(sum(self.places[kind].values()) for kind in kinds)

    def clear(self) -> None:
        """Reset the counts."""
        self.places.clear()


BLOCKING_UPLOAD, UPLOAD = "blocking upload", "upload"
BLOCKING_READ, READ = "blocking read", "read"
WAIT = "wait for a stream"

_rooms = tuple(str(ROOT / layer) for layer in LAYERS)


def _place() -> str:
    for frame in reversed(traceback.extract_stack(limit=30)):
        if frame.filename.startswith(_rooms):
            return f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno}"
    return "elsewhere"


crossings = Crossings()


class CudaTensor(Tensor):
    """A tensor that claims to lie on ``cuda:0``; for torch's own code it is a CPU tensor."""

    content: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> CudaTensor:
        make: Any = Tensor._make_wrapper_subclass
        # Views of an inference tensor could not share its version counter.
        with torch.inference_mode(False):
            made: CudaTensor = make(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device="cpu",
            )
        made.content = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.content!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks what it passes
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _is_there(value: object) -> bool:
    return isinstance(value, CudaTensor)


def _inner(value: Any) -> Any:
    return value.content if isinstance(value, CudaTensor) else value


def _there(value: Any) -> Any:
    return CudaTensor(value) if isinstance(value, Tensor) and not _is_there(value) else value


# Reads whose result, or its size, the host needs.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch with some tensors on the device."""
    name = func._schema.name.split("::")[1]
    if name == "copy_":
        return _copy(*args, **kwargs)
    if name in _READS:
        crossings.note(BLOCKING_READ)
    if name in ("index", "index_put_", "index_put"):
        _look_at_index(args[1])
    else:
        stray = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        stray = [x for x in stray if not _is_there(x) and x.dim() > 0]
        if stray:
            raise RuntimeError(f"{func} of tensors on both devices: {[x.shape for x in stray]}")
    done = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    is_in_place = any(
        each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns
    )
    if name in ("_local_scalar_dense", "equal", "is_nonzero"):
        return done
    if is_in_place:
        return kwargs.get("out", args[0])
    return tree_map(_there, done)


def _look_at_index(index: Any) -> None:
    for each in index:
        if each is None:
            continue
        if not _is_there(each):
            crossings.note(BLOCKING_UPLOAD)
        if each.dtype in (torch.bool, torch.uint8):
            crossings.note(BLOCKING_READ)  # the result's size depends on the contents


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if _is_there(target) != _is_there(source):
        _note_copy(_is_there(target), non_blocking and _is_pinned(target, source))
    _inner(target).copy_(_inner(source))
    return target


# By address, and kept alive: freed memory would be reused by another tensor and still be pinned.
_pinned: dict[int, torch.UntypedStorage] = {}


def _pin(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = storage


def _is_pinned(*tensors: Tensor) -> bool:
    return any(
        not _is_there(each) and each.untyped_storage().data_ptr() in _pinned for each in tensors
    )


def _note_copy(is_upload: bool, is_free: bool) -> None:
    kinds = (UPLOAD, BLOCKING_UPLOAD) if is_upload else (READ, BLOCKING_READ)
    crossings.note(kinds[not is_free])


def _wants_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


# They read memory directly, bypassing the wrapper.
_NUMBERS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)


class _Rules(TorchFunctionMode):
    """Handles functions that name a device, and those that would bypass a wrapper."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            _pin(args[0])
            return args[0]
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return _move(func, args, kwargs)
        if func is Tensor.numpy and _is_there(args[0]):
            raise RuntimeError("numpy() of a tensor on CUDA")
        if func in _NUMBERS and _is_there(args[0]):
            crossings.note(BLOCKING_READ)
            return func(args[0].content)
        if func is torch.cuda.is_available:
            return True
        pins = kwargs.pop("pin_memory", False)
        if _wants_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
            if func is torch.tensor:
                crossings.note(BLOCKING_UPLOAD)
            return tree_map(_there, func(*tree_map(_inner, args), **kwargs))
        made = func(*args, **kwargs)
        if pins:
            _pin(made)
        return made


def _move(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    device = kwargs.pop("device", None)
    if func is not Tensor.to:
        device = "cpu" if func is Tensor.cpu else "cuda"
    elif rest and isinstance(rest[0], torch.device | str):
        device = rest.pop(0)
    elif rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, rest = other.device, [other.dtype]
    target = _is_there(tensor) if device is None else _wants_cuda(device)
    non_blocking = kwargs.pop("non_blocking", False)
    if target == _is_there(tensor):
        return tensor.to(*rest, **kwargs) if rest or kwargs else tensor
    _note_copy(target, non_blocking and _is_pinned(tensor))
    moved = _inner(tensor).to(*rest, **kwargs)
    if moved is _inner(tensor):
        moved = moved.clone()
    return _there(moved) if target else moved


class _Stream:
    def synchronize(self) -> None:
        crossings.note(WAIT)


@contextmanager
def pretended_cuda(monkeypatch: Any) -> Iterator[Crossings]:
    """Provide a device ``cuda:0`` with 80 GiB, and record the transfers to and from it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: _Stream())
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda _: 0)
    monkeypatch.setattr(triton_backend, "_multiprocessors", lambda _: 16)
    monkeypatch.setattr(llm_engine, "CudaGraphs", CalledGraphs)
    if find_spec("triton") is not None:
        need_interpreter()
        from engine.attention import triton_kernels
        from engine.layers import triton_ops

        for module, names in (
            (triton_kernels, ("paged_attention", "merge_segments")),
            (triton_ops, ("norm_rows", "rotate_heads", "gate_rows")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, _Launched(getattr(module, name)))
    crossings.clear()
    _pinned.clear()
    with _Rules():
        yield crossings


class _Launched:
    """``kernel[grid](...)`` as Python, on the tensors that device tensors wrap."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            strays = [x for x in args if isinstance(x, Tensor) and not _is_there(x)]
            assert not strays, "a kernel on CUDA got a tensor of the host"
            with torch._C.DisableTorchFunction():
                self._kernel[grid](*map(_inner, args), **options)

        return launch
