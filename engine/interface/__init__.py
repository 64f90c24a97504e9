"""What users touch: prompts, configs, sampling, outputs, stats. Imports no torch, no other room."""

__all__: tuple[str, ...] = ()
