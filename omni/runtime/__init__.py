"""Runs requests through a pipeline. Imports pipelines, requests, stages, engine."""

__all__: tuple[str, ...] = ()
