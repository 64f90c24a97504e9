"""Devices, and the plan and report of the memory that an engine reserves.

Imports prefix_cache, interface.
"""
