"""Execution of a scheduled step, from tables to samples. Imports scheduling, models and below."""
