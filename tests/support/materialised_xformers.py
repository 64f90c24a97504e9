"""The xformers backend on a CPU: its biases and rows, without its kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from engine.attention.xformers_backend import XformersBackend


class MaterialisedXformers(XformersBackend):
    """xformers' own biases, materialised to dense masks; only its CUDA kernels are replaced."""

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, bias: Any, scale: float, *, paged: bool
    ) -> Tensor:
        width = keys.shape[0]
        if paged:
            bias, read = _pages_read(bias, keys.shape[0])
            keys, values = (rows.masked_fill(~read, 0.0) for rows in (keys, values))
            # The unpaged width first; the returned paged mask covers the used pages.
            width = bias.block_tables.numel() * bias.page_size
        mask = bias.materialize((query.shape[0], width))
        keys, values = keys[: mask.shape[1]], values[: mask.shape[1]]
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * scale
        weights = (scores + mask).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


def _pages_read(bias: Any, num_rows: int) -> tuple[Any, Tensor]:
    """Return what the kernel reads: each row of the table to the page where its sequence ends."""
    tables = torch.zeros_like(bias.block_tables)
    read = torch.zeros(-(-num_rows // bias.page_size), bias.page_size, dtype=torch.bool)
    for row, pages, end in zip(tables, bias.block_tables, bias.k_seqinfo.seqlen_py, strict=True):
        num_pages = -(-end // bias.page_size)
        row[:num_pages] = pages[:num_pages]
        read[row[:num_pages].long()] = True
    return dataclasses.replace(bias, block_tables=tables), read.flatten()[:num_rows, None, None]
