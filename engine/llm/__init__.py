"""The engine of autoregressive stages, and how it is put together.

Imports execution, scheduling, models, inputs and the rooms below them.
"""
