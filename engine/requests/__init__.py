"""What a sequence carries on its way through an engine. Imports sampling, text, interface."""

__all__: tuple[str, ...] = ()
