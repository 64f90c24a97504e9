"""Tiny checkpoints with seeded random weights, written when first asked for. Imports engine."""
