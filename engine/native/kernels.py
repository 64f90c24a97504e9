"""Python bindings of the C kernels: checks here, arithmetic in ``kernels.c``.

They are compiled with the system's compiler, once per machine, source and compiler: an entry of the
cache in ``$OMNI_CACHE_DIR/native`` or ``~/.cache/omni-pipeline/native``, under a hash of everything
that it depends on; see :class:`~engine.files.disk_cache.DiskCache`. A damaged library is never
loaded: it would kill the process by a signal. A wheel may include compiled ones; see ``setup.py``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.files.disk_cache import CacheFolderError, DiskCache, cache_root
from prefix_cache import LayerKVCache

FOLDER = Path(__file__).parent
FLAGS_FILE = FOLDER / "flags.txt"
SOURCES = tuple(sorted(FOLDER.glob("*.[ch]")))
# The flags have no -ffast-math: linking with it makes the whole process flush denormals to zero.
_FLAGS = (f"@{FLAGS_FILE}", "-march=native")
_LIBRARY = "kernels.so"
# Compilation takes seconds, and many times as long on a busy machine.
_TIMEOUT_S = 1200


class NativeBuildError(RuntimeError):
    """Error if the kernels cannot be built or loaded; the message gives the reason."""


def find_compiler() -> str:
    """Return ``$CC``, or the first of gcc, cc and clang; ``NativeBuildError`` if there is none."""
    configured = os.environ.get("CC")
    for name in (configured,) if configured else ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeBuildError(
        f"$CC is {configured!r}, which is no program"
        if configured
        else "there is no C compiler (gcc, cc, clang)"
    )


def compile_kernels() -> Path:
    """Return the path of the shared library: the wheel's, or built if it is missing or damaged.

    Raises:
        NativeBuildError: there is no compiler, it failed (the message includes its output), or the
            cache cannot be used.
    """
    features = _cpu_features()
    # Those of a wheel are named by the features that they need; see setup.py.
    needed = {each: set(each.stem.split("+")) for each in FOLDER.glob("*.so")}
    built = [each for each, wanted in needed.items() if wanted <= set(features.split())]
    if built:
        return max(built, key=lambda each: len(needed[each]))
    compiler = find_compiler()
    source = b"".join(path.read_bytes() for path in SOURCES)
    flags = FLAGS_FILE.read_text()
    # -march=native depends on the machine, and home folders are shared between machines.
    parts = (source, _FLAGS, flags, _run([compiler, "--version"]), features)
    digest = hashlib.sha256(repr(parts).encode())
    try:
        cache = DiskCache(cache_root() / "native")
        return cache.entry(digest.hexdigest(), partial(_build, compiler)) / _LIBRARY
    except CacheFolderError as error:
        raise NativeBuildError(str(error)) from error


def _build(compiler: str, folder: Path) -> None:
    sources = [str(source) for source in SOURCES if source.suffix == ".c"]
    where = (f"-I{FOLDER}", "-pthread", "-shared", *sources, "-o", str(folder / _LIBRARY))
    _run([compiler, *_FLAGS, *where])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise NativeBuildError(
            f"{' '.join(command)} exited with {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return done.stdout


def _cpu_features() -> str:
    """Return the ``/proc/cpuinfo`` line of instruction sets, or else the machine's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


_SIGNATURES: dict[str, list[Any]] = {
    "omni_add_rms_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float, c_int],
    "omni_gated_silu": [c_void_p] * 2 + [c_int64] * 2 + [c_int],
    "omni_rotate": [c_void_p, c_int64, c_void_p, c_void_p] + [c_int64] * 4 + [c_int],
    "omni_mask_logits": [*[c_void_p] * 2, *[c_int64] * 3],
    "omni_linear": [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_int],
    "omni_linear_groups": [*[c_void_p] * 4, *[c_int64] * 3, c_void_p, c_int64, c_int],
    "omni_quantized": [
        *(c_void_p, c_int64, *[c_void_p] * 4, *[c_int64] * 4, c_int, c_int, c_void_p, c_int)
    ],
    "omni_write_kv": [*[c_void_p] * 2, *[c_int64] * 2, *[c_void_p] * 3, *[c_int64] * 2, c_int],
    "omni_paged_attention": [
        *(c_void_p, c_int64, c_void_p, c_int64),
        *[c_void_p] * 5,
        c_int,
        *[c_int64] * 4,
        *[c_int32] * 4,
        *(c_float, c_float, c_void_p, c_int64, c_void_p, c_void_p, c_int),
    ],
    "omni_snake": [*[c_void_p] * 2, *[c_int64] * 3, *[c_void_p] * 4, c_int],
}

# Number of outputs that linear.c interleaves; it computes two panels at once.
_PANEL = 16
# From this number on, a copy of the rows, laid out for the kernel, costs less than it saves.
_MANY_ROWS = 65
# Positions of a separately computed part of a softmax, a multiple of TILE in kernels.c.
PART_TOKENS = 128
# Length of the filters of snake.c.
_SNAKE_TAPS = 12


# Numbers of inputs that share a scale in quantized.c; the largest that divides a group is used.
_BLOCKS = (128, 64, 32, 16)
# Exponent of the largest scale or offset of an output, as float16.
_HALF_EXPONENT = 15


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A quantized weight in the layout of quantized.c.

    Attributes:
        codes: ``(panels, blocks, bytes)`` uint8: an even number of panels of 16 outputs.
        factors: ``(outputs of all panels,)`` float32; empty for bfloat16.
        shape: ``(out, in)``.
        block: number of inputs in a block.
        bits: 4 or 8, or 16 for bfloat16.
    """

    codes: Tensor
    factors: Tensor
    shape: tuple[int, int]
    block: int
    bits: int


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """A span of positions per query token, shared by all layers of a step.

    The kernel does not check the table's entries and the spans: their creator must.

    Attributes:
        block_table: ``(num_reqs, blocks)`` int32, contiguous.
        spans: ``(3, num_tokens)`` int32, rows may be strided: for each token, its request's row in
            the table, the first position that it sees, and one past the last.
        num_parts: maximum number of parts of ``PART_TOKENS`` positions that a token sees, to run
            them in parallel; 1: the parts of a token run sequentially, with the same result bits.
    """

    block_table: Tensor
    spans: Tensor
    num_parts: int = 1

    def __post_init__(self) -> None:
        table, spans = self.block_table, self.spans
        if table.dtype != torch.int32 or table.ndim != 2 or not table.is_contiguous():
            raise ValueError(
                f"expected a contiguous int32 block table (num_reqs, blocks), got {table.dtype} "
                f"{tuple(table.shape)}, strides {table.stride()}"
            )
        if spans.dtype != torch.int32 or spans.shape[0] != 3 or spans.stride(1) != 1:
            raise ValueError(
                f"expected int32 spans (3, num_tokens), got {spans.dtype} {tuple(spans.shape)}"
            )


class NativeKernels:
    """Kernels for float32 on a CPU, with weights and pages optionally in bfloat16.

    They run on ``torch.get_num_threads()`` threads of the team (team.c).

    Args:
        library: path from :func:`engine.native.kernels.compile_kernels`.

    Attributes:
        instructions: instruction set that they were compiled for, such as ``AVX2``.
        has_linear: True if :meth:`linear` is fast on this processor (AVX-512, AVX2, NEON).
        has_whole_codes: True if :meth:`quantized` multiplies codes as integers (AVX512-VNNI,
            AVX2).
        has_bfloat16: True if it multiplies bfloat16 directly (AVX512-BF16).
        has_tiles: True if it multiplies many rows by bfloat16 in tiles (AMX). Sums of tiles are
            rounded in another order than those of few rows.

    Raises:
        NativeBuildError: the library does not load into this process.
    """

    def __init__(self, library: Path) -> None:
        try:
            functions = ctypes.CDLL(str(library))
            for name, argtypes in _SIGNATURES.items():
                function = getattr(functions, name)
                function.argtypes = argtypes
                function.restype = None
        except (OSError, AttributeError) as error:
            raise NativeBuildError(f"the built kernels do not load: {error}") from error
        functions.omni_linear_groups.restype = c_int
        self._functions = functions
        functions.omni_instructions.restype = c_char_p
        self.instructions: str = functions.omni_instructions().decode()
        self.has_linear = bool(functions.omni_has_linear())
        self.has_whole_codes = bool(functions.omni_has_whole_codes())
        self.has_bfloat16 = bool(functions.omni_has_bfloat16())
        self.has_tiles = bool(functions.omni_has_tiles())

    def pack_linear(self, weight: Tensor) -> Tensor | None:
        """Pack a weight ``(out, in)`` for :meth:`linear`, as ``(out / 16, in, 16)``.

        Returns None if it is not supported.
        """
        if not self.has_linear or weight.shape[0] % (2 * _PANEL):
            return None
        _require(weight=weight)
        return weight.view(-1, _PANEL, weight.shape[1]).transpose(1, 2).contiguous()

    def linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x W^T + b`` for ``x`` ``(rows, in)``, whose rows may be strided.

        Args:
            packed: W, packed by :meth:`pack_linear`.
            bias: ``(out,)`` or None.
        """
        panels, width, _ = packed.shape
        x = _checked_rows(x, width)
        rows, _ = x.shape
        output = x.new_empty(rows, panels * _PANEL)
        copy = x.new_empty(rows, width) if rows >= _MANY_ROWS else None
        bias_ptr = None if bias is None else bias.data_ptr()
        self._functions.omni_linear(
            *(x.data_ptr(), x.stride(0), packed.data_ptr(), bias_ptr, output.data_ptr()),
            *(rows, width, panels * _PANEL, None if copy is None else copy.data_ptr()),
            torch.get_num_threads(),
        )
        return output

    def linear_groups(self, packed: Sequence[Tensor], x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Compute one product per group of consecutive rows, like :meth:`linear`.

        Args:
            packed: weights of one shape, packed by :meth:`pack_linear`.
            x: ``(sum of sizes, in)``: ``sizes[0]`` rows for the first weight, and so on.
        """
        _require(x=x)
        panels, width, _ = packed[0].shape
        if x.shape != (sum(sizes), width) or any(each.shape != packed[0].shape for each in packed):
            raise ValueError(
                f"expected {sum(sizes)} rows of {width} and weights of one shape, got "
                f"{tuple(x.shape)} and {sorted({tuple(each.shape) for each in packed})}"
            )
        output = x.new_empty(len(x), panels * _PANEL)
        copy = torch.empty_like(x) if max(sizes) >= _MANY_ROWS else None
        weights = (c_void_p * len(packed))(*(each.data_ptr() for each in packed))
        rows = (c_int64 * len(packed))(*sizes)
        done = self._functions.omni_linear_groups(
            *(x.data_ptr(), weights, output.data_ptr(), rows, len(packed), width, panels * _PANEL),
            *(None if copy is None else copy.data_ptr(), _MANY_ROWS, torch.get_num_threads()),
        )
        if not done:
            raise MemoryError(f"no memory to multiply {len(packed)} groups of rows")
        return output

    def pack_quantized(
        self, codes: Tensor, scales: Tensor, offsets: Tensor, group_size: int, bits: int
    ) -> PackedCodes | None:
        """Pack a quantized weight for :meth:`quantized`; None if its groups are not supported.

        Args:
            codes: ``(out, in)`` uint8, below ``2**bits``; bits are 4 or 8.
            scales: ``(out, groups)`` float32.
            offsets: like ``scales``; a weight is ``code * scale + offset``.
        """
        out, width = codes.shape
        block = next((n for n in _BLOCKS if group_size % n == 0), None)
        if group_size >= width:
            block = _BLOCKS[0]
        if block is None or not (codes.is_cpu or codes.is_meta):
            return None
        rows, blocks = -out % (2 * _PANEL), -(-width // block)
        if codes.is_meta:  # only the size is needed
            size = (out + rows) // _PANEL, blocks, _PANEL * (4 + block * bits // 8)
            codes, factors = codes.new_empty(size), scales.new_empty(out + rows)
            return PackedCodes(codes, factors, (out, width), block, bits)
        # With one power of two per output, its groups can use 28 binades of float16.
        top = torch.maximum(scales.abs(), offsets.abs()).amax(1)
        factors = torch.ldexp(torch.ones(out), torch.frexp(top)[1] - _HALF_EXPONENT)
        header = torch.stack((scales, offsets), dim=1).div_(factors[:, None, None]).half()
        header = header.repeat_interleave(-(-group_size // block), dim=2)[..., :blocks]
        header = F.pad(header, (0, 0, 0, 0, 0, rows)).unflatten(0, (-1, _PANEL))
        codes = F.pad(codes, (0, blocks * block - width, 0, rows))
        codes = codes.view(-1, _PANEL, blocks, block // 8, 2, 4)
        if bits == 4:
            codes = codes[..., :1, :] | codes[..., 1:, :] << 4
        # From (panel, output, block, step, ...) to (panel, block, step, output, ...).
        laid_out = codes.flatten(3, 4).permute(0, 2, 3, 1, 4).flatten(2)
        bytes_of = header.permute(0, 3, 2, 1).contiguous().view(torch.uint8).flatten(2)
        packed = torch.cat((bytes_of, laid_out), dim=2)
        return PackedCodes(packed, F.pad(factors, (0, rows)), (out, width), block, bits)

    def pack_bfloat16(self, weight: Tensor) -> PackedCodes:
        """Pack a bfloat16 weight ``(out, in)`` for :meth:`quantized`."""
        out, width = weight.shape
        block = 2 * _PANEL  # inputs of a tile
        padded = F.pad(weight, (0, -width % block, 0, -out % (2 * _PANEL)))
        pairs = padded.view(-1, _PANEL, padded.shape[1] // 2, 2).transpose(1, 2)
        codes = pairs.contiguous().view(torch.uint8).view(pairs.shape[0], -(-width // block), -1)
        return PackedCodes(codes, torch.empty(0), (out, width), block, 16)

    def quantized(
        self, packed: PackedCodes, x: Tensor, bias: Tensor | None, *, in_tiles: bool = False
    ) -> Tensor:
        """Like :meth:`linear`, with a weight of :meth:`pack_quantized` or :meth:`pack_bfloat16`.

        Args:
            in_tiles: if true, multiply in tiles where the processor has them.
        """
        is_direct = self.has_bfloat16 if packed.bits == 16 else self.has_whole_codes
        rounding = 2 if is_direct and in_tiles and self.has_tiles else int(is_direct)
        out, width = packed.shape
        x = _checked_rows(x, width)
        rows, _ = x.shape
        output = x.new_empty(rows, out)
        blocks = packed.codes.shape[1]
        scratch = x.new_empty(rows * (blocks * (packed.block + 1) + 1))
        self._functions.omni_quantized(
            *(x.data_ptr(), x.stride(0), packed.codes.data_ptr(), packed.factors.data_ptr()),
            *(None if bias is None else bias.data_ptr(), output.data_ptr()),
            *(rows, width, out, packed.block, packed.bits, rounding, scratch.data_ptr()),
            torch.get_num_threads(),
        )
        return output

    def rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, x: Tensor | None = None
    ) -> Tensor:
        """Add x to ``residual`` ``(..., width)``; return ``residual / rms(residual) * weight``.

        The addition is in place.
        """
        if x is None:
            _require(residual=residual, weight=weight)
        elif x.shape != residual.shape:
            raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}")
        else:
            _require(residual=residual, weight=weight, x=x)
        width = residual.shape[-1]
        if weight.shape != (width,):
            raise ValueError(f"weight is {tuple(weight.shape)}, rows are {width} wide")
        output = torch.empty_like(residual)
        self._functions.omni_add_rms_norm(
            *(None if x is None else x.data_ptr(), residual.data_ptr(), weight.data_ptr()),
            *(output.data_ptr(), residual.numel() // width, width, eps, torch.get_num_threads()),
        )
        return output

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """Compute ``silu(gate) * up`` for ``(rows, 2 * width)``: gates first, then ups."""
        _require(gate_up=gate_up)
        rows, both = gate_up.shape
        if both % 2:
            raise ValueError(f"gate_up has {both} columns, which are not two halves")
        output = gate_up.new_empty(rows, both // 2)
        self._functions.omni_gated_silu(
            gate_up.data_ptr(), output.data_ptr(), rows, both // 2, torch.get_num_threads()
        )
        return output

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate heads in place; see :func:`engine.layers.apply_rotary`.

        Args:
            heads: ``(num_tokens, num_heads, head_dim)``; tokens may be strided.
            cos: ``(num_tokens, 1, rotary_dim)``.
            sin: like ``cos``, with the first half negated.
        """
        _require(cos=cos, sin=sin)
        _require_rows(heads=heads)
        num_tokens, num_heads, head_dim = heads.shape
        rotary_dim = cos.shape[-1]
        fits = rotary_dim <= head_dim and rotary_dim % 2 == 0
        if not fits or cos.shape != (num_tokens, 1, rotary_dim) or sin.shape != cos.shape:
            raise ValueError(
                f"heads {tuple(heads.shape)} take no cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
            )
        self._functions.omni_rotate(
            *(heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr()),
            *(num_tokens, num_heads, head_dim, rotary_dim // 2, torch.get_num_threads()),
        )

    def mask_logits(self, logits: Tensor, allowed: NDArray[np.uint8]) -> None:
        """Set logits ``(rows, vocab)`` of tokens that are not allowed to minus infinity, in place.

        Args:
            allowed: ``(rows, bytes)``: one bit per token, lowest id in the lowest bit.
        """
        _require(logits=logits)
        rows, vocab = logits.shape
        fits = allowed.dtype == np.uint8 and allowed.flags.c_contiguous and allowed.ndim == 2
        if not fits or len(allowed) != rows or allowed.shape[1] * 8 < vocab:
            raise ValueError(
                f"logits {tuple(logits.shape)} take no {allowed.dtype} bits {allowed.shape}"
            )
        self._functions.omni_mask_logits(
            logits.data_ptr(), allowed.ctypes.data, rows, vocab, allowed.shape[1]
        )

    def write_kv(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rows: Tensor
    ) -> None:
        """Store keys and values ``(num_tokens, num_kv_heads, head_dim)`` in their pages.

        Args:
            key: keys of this step; tokens may be strided.
            keys: :attr:`prefix_cache.LayerKVCache.keys`; float32 or bfloat16.
            rows: ``(num_tokens,)`` int64 row of each token; must be checked by the caller.
        """
        _require_rows(key=key, value=value)
        if not key.shape == value.shape == (rows.shape[0], *keys.shape[1:]):
            raise ValueError(
                f"key {tuple(key.shape)}, value {tuple(value.shape)} for keys {tuple(keys.shape)}"
            )
        self._functions.omni_write_kv(
            *(key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)),
            *(rows.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(rows.shape[0], keys.shape[1] * keys.shape[2], keys.dtype == torch.bfloat16),
        )

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: LayerKVCache,
        spans: PagedSpans,
        scale: float,
        softcap: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend to the paged keys and values of the tokens' sequences, read in place.

        Args:
            query: ``(num_tokens, num_heads, head_dim)``; tokens may be strided.
            kv_cache: float32 or bfloat16, as in :meth:`write_kv`.
            spans: visible positions of each token; tokens with an empty span get zeros.
            softcap: scores become ``softcap * tanh(score / softcap)``; None: no cap.
            bias: ``(num_heads, distances)`` added to scores by the distance from the end of the
                token's span back to the key; larger distances use the last column.

        Returns:
            ``(num_tokens, num_heads, head_dim)``.
        """
        _require_rows(query=query)
        half = kv_cache.keys.dtype == torch.bfloat16
        num_tokens, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, key_dim = kv_cache.chunks.shape
        if num_heads % num_kv_heads or key_dim != head_dim:
            raise ValueError(f"query {tuple(query.shape)}, but keys {tuple(kv_cache.keys.shape)}")
        if spans.spans.shape[1] != num_tokens:
            raise ValueError(f"{num_tokens} tokens, but spans {tuple(spans.spans.shape)}")
        if bias is not None:
            _require(bias=bias)
            if bias.ndim != 2 or bias.shape[0] != num_heads or bias.shape[1] < 1:
                raise ValueError(f"{num_heads} heads take no bias {tuple(bias.shape)}")
        scratch = query.new_empty(num_tokens, spans.num_parts, num_heads, head_dim + 2)
        output = query.new_empty(query.shape)
        first_row, row_stride = spans.spans.data_ptr(), spans.spans.stride(0) * 4
        self._functions.omni_paged_attention(
            *(query.data_ptr(), query.stride(0)),
            *(spans.block_table.data_ptr(), spans.block_table.stride(0)),
            *(first_row, first_row + row_stride, first_row + 2 * row_stride),
            *(kv_cache.keys.data_ptr(), kv_cache.values.data_ptr(), half),
            kv_cache.chunks_per_page * block_size * num_kv_heads * head_dim,
            *(num_tokens, spans.num_parts, PART_TOKENS, block_size),
            *(num_kv_heads, num_heads // num_kv_heads, head_dim),
            *(scale, softcap or 0.0),
            None if bias is None else bias.data_ptr(),
            0 if bias is None else bias.shape[1],
            *(scratch.data_ptr(), output.data_ptr(), torch.get_num_threads()),
        )
        return output

    def snake(
        self, samples: Tensor, up: Tensor, down: Tensor, rates: Tensor, scales: Tensor
    ) -> Tensor:
        """Compute ``u + scale * sin(rate * u)^2`` at twice the rate of the samples.

        Args:
            samples: ``(B, channels, n)``; beyond the ends the first and last samples repeat.
            up: ``(12,)``, low-pass filter for upsampling to ``u``.
            down: ``(12,)``, low-pass filter for downsampling.
            rates: ``(channels,)``.
            scales: ``(channels,)``.

        Returns:
            A tensor of the shape of ``samples``.
        """
        _require(samples=samples, up=up, down=down, rates=rates, scales=scales)
        batch, channels, length = samples.shape
        for tensor, name, size in (
            *((up, "up", _SNAKE_TAPS), (down, "down", _SNAKE_TAPS)),
            *((rates, "rates", channels), (scales, "scales", channels)),
        ):
            if tensor.shape != (size,):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, expected ({size},)")
        output = torch.empty_like(samples)
        self._functions.omni_snake(
            *(samples.data_ptr(), output.data_ptr(), batch * channels, channels, length),
            *(up.data_ptr(), down.data_ptr(), rates.data_ptr(), scales.data_ptr()),
            torch.get_num_threads(),
        )
        return output


def _require(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 on a CPU, got {tensor.dtype} on "
                f"{tensor.device}, strides {tensor.stride()}"
            )


def _checked_rows(x: Tensor, width: int) -> Tensor:
    if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1] != width:
        raise ValueError(
            f"expected float32 rows of {width} on a CPU, got {x.dtype} rows of {x.shape[-1]} "
            f"on {x.device}"
        )
    return x if x.stride(-1) == 1 else x.contiguous()


def _require_rows(**tensors: Tensor) -> None:
    """Like :func:`_require`, but contiguous only within ``tensor[i]`` ``(heads, head_dim)``."""
    for name, tensor in tensors.items():
        _, heads, head_dim = tensor.shape
        _, head_stride, stride = tensor.stride()
        packed = stride == 1 and (head_stride == head_dim or heads == 1)
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not packed:
            raise ValueError(
                f"{name} must be float32 on a CPU with contiguous (heads, head_dim), got "
                f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
            )
