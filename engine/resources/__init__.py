"""Devices and memory: what an engine reserves, and what it says of it. Imports interface."""

__all__: tuple[str, ...] = ()
