"""Attention over paged keys and values: one interface, several backends.

Imports native, and the prefix cache.
"""

from __future__ import annotations

from engine.attention.backend import AttentionBackend
from engine.attention.layer import Attention
from engine.attention.metadata import AttentionMetadata
from engine.attention.native_backend import NativeBackend
from engine.attention.reference import ReferenceBackend
from engine.attention.registry import BACKEND_NAMES, get_backend, resolve_backend_name
from engine.attention.scoring import Scoring
from engine.attention.step import AttentionStep
from engine.attention.torch_backend import TorchBackend

__all__ = [
    "BACKEND_NAMES",
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionStep",
    "NativeBackend",
    "ReferenceBackend",
    "Scoring",
    "TorchBackend",
    "get_backend",
    "resolve_backend_name",
]
