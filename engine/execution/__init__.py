"""Execution of a scheduled step, from input tables to samples. Imports scheduling and models."""
