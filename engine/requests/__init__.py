"""What a sequence carries on its way through an engine.

Imports prefix_cache, sampling, text, interface.
"""
