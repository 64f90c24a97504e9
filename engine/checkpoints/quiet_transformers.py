"""Keeps transformers' remarks and progress bars out of other people's terminals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

__all__ = ["hidden_progress_bars", "quiet_config_log"]

_LOGGER = logging.getLogger("transformers.configuration_utils")
# The config of a part may name tokens of another part's vocabulary, which is larger than its own.
_EXPECTED = "within the vocabulary"


@contextmanager
def quiet_config_log() -> Iterator[None]:
    """Drop remarks on ids that lie outside a config's own vocabulary; all others pass."""
    _LOGGER.addFilter(_is_unexpected)
    try:
        yield
    finally:
        _LOGGER.removeFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return _EXPECTED not in str(record.msg)


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Have transformers load and save in silence, for as long as the context lasts.

    The switch that transformers offers also turns the download bars of the hub on or off, and
    forgets how they were. The hook that makes its bars is put back as it was.
    """
    previous = set_tqdm_hook(_disabled)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _disabled(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return make(*args, **kwargs | {"disable": True})
