"""The error that a wrong pipeline configuration raises."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A pipeline configuration is wrong. The message names each wrong place and what to do."""
