"""Features of several depths of a vision tower. Imports engine.models.qwen2_5_vl and decoders."""

__all__: tuple[str, ...] = ()
