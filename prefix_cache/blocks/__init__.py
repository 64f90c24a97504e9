"""Blocks, hashes, pages, eviction order and the integrity error. Imports specs."""
