"""Trains the checkpoint of ``stage_configs/spoken_sums``; see README.md next to this file."""
