"""Keeps the progress bars of transformers out of other people's terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

__all__ = ["hidden_progress_bars"]


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
