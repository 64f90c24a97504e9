"""Scheduler, request queues and their resources. Imports requests and below; no model."""
