"""The operations between matrix products, each as one Triton kernel. Imported only where it runs.

Values are rounded where :class:`LayerOps` rounds them, except for the fused sum in a rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.layers.layer_ops import LayerOps


@triton.jit
def norm_rows(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Normalise one row per program; with ``ADDS``, first add the row of ``x`` to the residual."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    loaded = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    x = loaded.to(tl.float32)
    if ADDS:
        residual_at = residual_ptr + row * WIDTH + at
        x += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        added = x.to(loaded.dtype)
        tl.store(residual_at, added, mask=inside)
        x = added.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    normed = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(output_ptr + row * WIDTH + at, normed.to(loaded.dtype), mask=inside)


@triton.jit
def rotate_heads(
    heads_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rotate all heads of one token per program; see :func:`apply_rotary`."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (at < HALF)
    first = heads_ptr + token * token_stride + head * head_stride + at
    left, right = tl.load(first, mask=inside), tl.load(first + HALF, mask=inside)
    at += token * 2 * HALF
    for half in tl.static_range(2):
        cos = tl.load(cos_ptr + at + half * HALF, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + at + half * HALF, mask=inside, other=0.0).to(tl.float32)
        own, other = (right, left) if half else (left, right)
        turned = own.to(tl.float32) * cos + other.to(tl.float32) * sin
        tl.store(first + half * HALF, turned.to(left.dtype), mask=inside)


@triton.jit
def gate_rows(
    x_ptr: tl.tensor, output_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute ``silu(gate) * up`` for one stretch of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output_ptr + row * WIDTH + at, (opened * up).to(gate.dtype), mask=inside)


class TritonLayerOps(LayerOps):
    """Triton kernels on CUDA; other memory layouts and activations other than SiLU use torch."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """See :class:`LayerOps`; if given, ``residual`` is updated to the sum and normalised."""
        width, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        adds, block = residual is not None, triton.next_power_of_2(width)
        other = rows if residual is None else residual
        sizes = {"WIDTH": width, "BLOCK": block, "ADDS": adds, "num_warps": 8 if adds else 4}
        if len(rows):
            grid = (len(rows),)
            norm_rows[grid](rows, other, weight, output, rows.stride(0), eps, **sizes)
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`LayerOps`."""
        if not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        return self.rms_norm(x, weight, eps, residual)

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        """See :class:`LayerOps`."""
        if not isinstance(activation, nn.SiLU) or gate_up.ndim != 2 or not len(gate_up):
            return super().gate(gate_up, activation)
        rows, width = len(gate_up), gate_up.shape[1] // 2
        output = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        grid = rows, triton.cdiv(width, 1024)
        gate_rows[grid](gate_up.contiguous(), output, WIDTH=width, BLOCK=1024)
        return output

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See :class:`LayerOps`."""
        fits = heads.ndim == 3 and heads.stride(2) == 1 and cos.shape[:2] == (len(heads), 1)
        if not fits or not len(heads):
            super().rotate(heads, cos, sin)
            return
        half, count = cos.shape[-1] // 2, heads.shape[1]
        blocks = {"BLOCK_H": triton.next_power_of_2(count), "BLOCK": triton.next_power_of_2(half)}
        grid, strides = (len(heads),), heads.stride()[:2]
        cos, sin = cos.contiguous(), sin.contiguous()
        rotate_heads[grid](heads, cos, sin, *strides, NUM_HEADS=count, HALF=half, **blocks)
