"""Requests: the state of sequences in an engine.

Imports prefix_cache, sampling, text, interface.
"""
