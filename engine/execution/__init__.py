"""Runs a scheduled step, from tables to samples. Imports scheduling, models and what is below."""
