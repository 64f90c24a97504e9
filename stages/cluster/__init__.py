"""Stages in actors of a Ray cluster: joining or starting it, reservations, connections.

The only package that imports Ray; others import it only on demand. The messages are the same as
between processes: bytes, accompanied by references into Ray's object store.
"""
