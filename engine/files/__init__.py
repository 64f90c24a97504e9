"""Caches on disk, and readers of untrusted files.

Imports nothing of the project.
"""
