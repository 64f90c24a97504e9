"""Runs requests through a pipeline. Imports pipelines, requests, documents, stages, engine."""

__all__: tuple[str, ...] = ()
