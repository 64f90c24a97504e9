"""Keeps transformers' remarks on a checkpoint's config out of other people's terminals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_config_log"]

_LOGGER = logging.getLogger("transformers.configuration_utils")
# A talker's config names tokens of the thinker's vocabulary, which is larger than its own.
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
