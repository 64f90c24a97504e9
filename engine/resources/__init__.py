"""Devices and memory: what an engine reserves, and what it says of it.

Imports prefix_cache, interface.
"""
