"""Engines in which a token's rows become NaN, always or in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLMEngine
from engine.requests.encoder_input import EncoderInput

POISON = 705
"""A token that a stream's requests never have, see ``request_stream``; its embedding is NaN."""


def poison_embeddings(engine: LLMEngine, patch: pytest.MonkeyPatch) -> None:
    """Set the embedding of ``POISON`` to NaN, in an encoder too, until the patch is undone."""
    model: Any = engine._runner._model
    if model.encoder_hidden_size:
        _poison_encoder(model, patch)
    embed = model.embed

    def poisoned(token_ids: Tensor) -> Tensor:
        rows: Tensor = embed(token_ids).clone()
        rows[token_ids == POISON] = torch.nan
        return rows

    patch.setattr(model, "embed", poisoned)


def _poison_encoder(model: Any, patch: pytest.MonkeyPatch) -> None:
    encode = model.encode

    def poisoned(inputs: Sequence[EncoderInput]) -> Tensor:
        rows: Tensor = encode(inputs).clone()
        for entry, its_rows in zip(
            inputs, rows.split([entry.num_tokens for entry in inputs]), strict=True
        ):
            if POISON in entry.token_ids:
                its_rows[-1] = torch.nan
        return rows

    patch.setattr(model, "encode", poisoned)


def spoil_attention_once(
    engine: LLMEngine,
    patch: pytest.MonkeyPatch,
    part: str,
    place: int,
    number: float = float("nan"),
) -> list[int]:
    """Set the key or value of one packed token in a middle layer to ``number`` in one prefill.

    Args:
        engine: of a model with attention.
        patch: undoes it.
        part: ``key`` or ``value``.
        place: the token's row in the step; -1 for the last.
        number: the new value.

    Returns:
        A list to which the number of the step's tokens is appended when it has happened.
    """
    model: Any = engine._runner._model
    layers = model.attention_layers
    layer = layers[len(layers) // 2]
    happened: list[int] = []
    call = type(layer).__call__

    def spoilt(self: Any, query: Tensor, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if self is layer and not happened and key is not None and len(key) > 1:
            happened.append(len(key))
            parts = {"key": key.clone(), "value": value.clone()}
            parts[part][place] = number
            key, value = parts["key"], parts["value"]
        return call(self, query, key, value, *rest, **more)

    patch.setattr(type(layer), "__call__", spoilt)
    return happened


def spoil_state_once(engine: LLMEngine, patch: pytest.MonkeyPatch, place: int) -> list[int]:
    """Set the state of one request to NaN before a recurrent layer continues from it, in one step.

    See :func:`spoil_attention_once`; ``place`` is the request's position in the step.
    """
    model: Any = engine._runner._model
    layer = model.state_layers[len(model.state_layers) // 2]
    happened: list[int] = []
    read: Callable[..., tuple[Tensor, ...]] = type(layer).read

    def spoilt(self: Any, step: Any) -> tuple[Tensor, ...]:
        states = read(self, step)
        if self is layer and not happened and len(states[0]) > place:
            happened.append(len(states[0]))
            for state in states:
                state[place] = torch.nan
        return states

    patch.setattr(type(layer), "read", spoilt)
    return happened
