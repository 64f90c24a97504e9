"""Times between tokens, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

__all__ = ["Gaps", "TokenGaps"]

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BUCKETS = (*map(str, _BOUNDS_S), "+Inf")


class Gaps:
    """Those of the tokens of one stage: how many are how long. Added to by one thread."""

    def __init__(self) -> None:
        self._counts = [0] * len(_BUCKETS)
        self._sum_s = 0.0

    def add(self, seconds: float, number: int) -> None:
        """Count gaps that are equally long."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += number
        self._sum_s += seconds * number

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets, each with how many are no longer, and the sum in seconds."""
        counts = map(float, accumulate(self._counts))
        return list(zip(_BUCKETS, counts, strict=True)), self._sum_s


class TokenGaps(Collector):
    """Those of all stages of which a user gets something; may be read by any thread.

    Every token of every request counts here, and a histogram of prometheus_client takes ten times
    as long for each: it locks, and looks at one bucket after the other.
    """

    def __init__(self) -> None:
        self._gaps: dict[tuple[str, str], Gaps] = {}

    def of(self, model: str, stage: str) -> Gaps:
        """Those of one stage."""
        return self._gaps.setdefault((model, stage), Gaps())

    def collect(self) -> Iterator[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        family = HistogramMetricFamily(
            "omni_time_between_tokens_seconds",
            "From one token to the next, of stages whose text or tensors the user gets.",
            labels=["model", "stage"],
        )
        for labels, gaps in list(self._gaps.items()):
            buckets, sum_s = gaps.told()
            family.add_metric(labels, buckets, sum_s)
        yield family
