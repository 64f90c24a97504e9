"""A request of the wrong form is refused where it is made."""

from __future__ import annotations

from typing import Any

import pytest

from omni import OmniRequest, SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": 3}, "request_id must be str | None, got 3"),
        ({"priority": "high"}, "priority must be int, got 'high'"),
        ({"cache_salt": b"x"}, "cache_salt must be str | None, got b'x'"),
        ({"sampling": None}, "sampling must be Mapping, got None"),
        ({"sampling": {"writer": None}}, "sampling for stage 'writer' must be SamplingParams or a"),
        ({"sampling": {5: {}}}, "sampling must name stages by str, got 5"),
        ({"sampling": {"writer": [1]}}, "of its fields, got [1]"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OmniRequest("x", **fields)
    assert message in str(caught.value)


def test_a_request_of_the_right_form_is_made() -> None:
    sampling = {"a": SamplingParams(), "b": {"max_tokens": 1}}
    request = OmniRequest("x", "id", sampling=sampling, priority=-1, cache_salt="s")
    assert request.sampling is sampling
