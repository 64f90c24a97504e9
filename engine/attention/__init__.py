"""Backends for attention over paged keys and values. Imports native and prefix_cache."""
