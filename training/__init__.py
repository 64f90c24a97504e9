"""What made the weights that ship; nothing else imports it."""

__all__: list[str] = []
