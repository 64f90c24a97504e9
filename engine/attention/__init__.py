"""Attention over paged keys and values, by several backends. Imports native and prefix_cache."""
