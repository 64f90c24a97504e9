"""Blocks, hashes, pages, the order of eviction; the integrity error. Imports specs."""
