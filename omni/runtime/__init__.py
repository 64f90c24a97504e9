"""Runs requests through a pipeline: Omni, the driver thread, the orchestrator.

Imports pipelines, requests, documents, stages, engine.
"""

__all__: tuple[str, ...] = ()
