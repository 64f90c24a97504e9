"""Trains the checkpoint of ``stage_configs/spoken_sums``; see README.md beside this file."""
