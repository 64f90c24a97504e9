"""Scheduler and request queues: tokens per step, and blocks per request. Imports no model."""
