"""The engine of autoregressive stages, and the assembly of its components.

Imports execution, scheduling, models, inputs and the packages below them.
"""
