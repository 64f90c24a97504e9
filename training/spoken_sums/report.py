"""Progress lines of the training."""

from __future__ import annotations

from torch import Tensor


class Report:
    """Shares of correct tokens since the last line, by name."""

    def __init__(self) -> None:
        self._right: dict[str, list[float]] = {}

    def add(self, **hits: Tensor) -> None:
        """Record which tokens of a batch were right."""
        for name, hit in hits.items():
            self._right.setdefault(name, []).append(hit.float().mean().item())

    def line(self) -> str:
        """Return the shares and reset them."""
        parts = [f"{name} {sum(every) / len(every):.4f}" for name, every in self._right.items()]
        self._right.clear()
        return "tokens right: " + ", ".join(parts)
