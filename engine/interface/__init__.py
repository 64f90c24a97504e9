"""What users touch: prompts, configs, sampling, outputs, stats; and reports of mistakes in them.

Imports no torch, no other room.
"""
