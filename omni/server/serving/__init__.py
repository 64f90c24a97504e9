"""Pipelines while they are served: who may ask, whose turn it is, what comes of a request.

Knows HTTP, but no vendor's shapes. Imports runtime, requests, pipelines, stages, engine.
"""
