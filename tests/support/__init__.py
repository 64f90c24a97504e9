"""What several tests share."""

__all__: list[str] = []
