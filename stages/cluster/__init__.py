"""Stages in the actors of a Ray cluster: joined or started, reserved, spoken to, left.

The only room that imports Ray, which the others ask for only where it is wanted. What crosses is
what crosses between processes: bytes, and beside them references into Ray's object store.
"""
