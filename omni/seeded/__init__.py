"""Tiny checkpoints with seeded random weights, built on first use. Imports engine."""
