"""Runs a pipeline cached and uncached, and compares. Imports runtime and what is below it."""
