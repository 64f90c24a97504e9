"""Runs requests through a pipeline. Imports pipelines, requests, stages, engine."""
