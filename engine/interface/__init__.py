"""The user-facing types: prompts, configs, sampling, outputs, stats; and reports of mistakes.

Imports no torch, no other room.
"""
