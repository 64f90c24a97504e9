"""Pipelines that come with the package, found by the name of their YAML file.

Imports nothing.
"""

from __future__ import annotations
