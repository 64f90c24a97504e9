"""Comparison of cached and uncached runs. Imports runtime and the packages below it."""
