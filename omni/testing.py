"""Assertions for users' own tests."""

from __future__ import annotations

from pathlib import Path

from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import Requests
from omni.runtime.omni import Omni
from omni.verification.verify import VerifyReport, verify


def assert_cached_equals_uncached(
    config: str | Path | PipelineConfig | Pipeline | Omni,
    requests: Requests,
    *,
    atol: float | None = None,
    exact: bool = False,
) -> VerifyReport:
    """Assert that caching changes no output of a pipeline, and that at least one request hit. ::

        def test_my_pipeline_may_cache() -> None:
            assert_cached_equals_uncached("my_pipeline.yaml", ["a prompt of more than a block"])

    Args:
        config: an ``Omni``, which stays open with warm caches, or any argument that ``Omni``
            accepts; that one is closed in the end.
        requests: one or several requests, as prompts or as ``OmniRequest``.
        atol: see :func:`~omni.verification.verify.verify`.
        exact: compare bits; see :func:`~omni.verification.verify.verify`.

    Returns:
        The report, in numbers.

    Raises:
        AssertionError: an output differs, a request failed, or none hit a cache; with the whole
            report.
        ValueError: the config or the requests are wrong.
    """
    __tracebackhide__ = True  # pytest shows the caller's line, not these
    if isinstance(config, Omni):
        report = verify(config, requests, atol=atol, exact=exact)
    else:
        with Omni(config) as omni:
            report = verify(omni, requests, atol=atol, exact=exact)
    if not report.equal or report.failures or not report.has_hits:
        raise AssertionError("\n".join(report.lines()))
    return report
