"""Gaps between tokens are told as a histogram of prometheus_client tells them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample

from omni.server.serving.meters import TokenGaps

SECONDS = [0.0, 0.0004, 0.001, 0.0011, 0.0025, 0.03, 0.5, 9.9, 10.0, 10.1, 70.0]


def samples_of(registry: CollectorRegistry) -> list[Sample]:
    (family,) = registry.collect()
    assert family.type == "histogram"
    return [sample for sample in family.samples if not sample.name.endswith("_created")]


def test_gaps_are_counted_as_a_histogram_counts_them():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = TokenGaps()
    ours.register(gaps)
    told = [sample.labels["le"] for sample in _one_added(gaps, ours) if "le" in sample.labels]
    histogram = Histogram(
        "omni_time_between_tokens_seconds",
        "From one token to the next, of stages whose text or tensors the user gets.",
        ["model", "stage"],
        buckets=[float(bound) for bound in told],
        registry=theirs,
    )
    histogram.labels("m", "s").observe(1.5)
    for number, seconds in enumerate(SECONDS, start=1):
        gaps.of("m", "s").add(seconds, number)
        for _ in range(number):
            histogram.labels("m", "s").observe(seconds)
    gaps.of("m", "other").add(0.02, 3)
    for _ in range(3):
        histogram.labels("m", "other").observe(0.02)
    rounded = [
        [(each.name, each.labels, round(each.value, 6)) for each in samples_of(registry)]
        for registry in (ours, theirs)
    ]
    assert rounded[0] == rounded[1]


def _one_added(gaps: TokenGaps, registry: CollectorRegistry) -> list[Sample]:
    assert samples_of(registry) == [], "no stage has told anything"
    gaps.of("m", "s").add(1.5, 1)
    return samples_of(registry)
