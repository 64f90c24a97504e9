"""Checkpoints of Hugging Face: their config, weights and parts. Imports nothing of the project."""
