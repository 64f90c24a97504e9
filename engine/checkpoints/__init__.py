"""Hugging Face checkpoints: configs, weights and parts. Imports files and interface."""
