"""Serving of pipelines: authentication, admission, and the outputs of requests.

Knows HTTP, but no vendor's API schema. Imports runtime, requests, pipelines, stages, engine.
"""
