"""How a client says how tokens are chosen, and what this means for the stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, ValidationError

from engine import SamplingParams
from engine.interface.placed_error import PlacedError
from engine.interface.schema_error import explain_validation_error
from engine.interface.suggestion import suggest
from omni.server.serving.api_error import ApiError
from omni.server.serving.asked import Terms
from omni.server.serving.request_body import ApiModel

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline

__all__ = ["SamplingFields", "StageFields", "TermFields", "merge_sampling"]


class TermFields(ApiModel):
    """Fields of all requests.

    Attributes:
        priority: lower comes first.
        cache_salt: only requests with the same salt, of the same API key, share cached blocks.
    """

    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    def terms(self, speaker: str | None = None) -> Terms:
        """On which terms the request runs."""
        return Terms(self.priority, self.cache_salt, speaker)


class StageFields(TermFields):
    """Fields of all requests to pipelines with stages that sample.

    Attributes:
        stages: for stages other than the one that answers, and for all of its fields:
            ``{stage: {field: value}}``. What is said here of a stage counts.
    """

    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)


class SamplingFields(StageFields):
    """Fields of all requests that generate text; absent ones leave it to the stage's own.

    Those that OpenAI does not have are :class:`~engine.SamplingParams`'s.
    """

    own_fields: ClassVar[tuple[str, ...]] = (
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
        *("min_tokens", "suppress_token_ids", "logit_bias", "truncate_prompt_tokens"),
    )
    """Those that mean the same to a stage under the same name."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    suppress_token_ids: list[int] | None = None
    logit_bias: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None

    def given_fields(self) -> dict[str, Any]:
        """What is given of :attr:`own_fields`."""
        given = {name: getattr(self, name) for name in self.own_fields}
        return {name: value for name, value in given.items() if value is not None}


def merge_sampling(
    pipeline: Pipeline,
    stage: str,
    fields: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
    others_at: str = "stages",
) -> dict[str, SamplingParams]:
    """Lay what a client asked for over the stages' own parameters.

    Args:
        pipeline: whose stages.
        stage: the one that answers.
        fields: for that stage.
        others: by stage.
        names: what the client calls those of ``fields`` that it knows by another name.
        others_at: where the client has said ``others``.

    Raises:
        ApiError: with status 400, and the wrong field as its ``param``.
    """
    merged = {}
    told_of_stages: dict[str, dict[str, str]] = {}
    for name in {stage: None, **dict.fromkeys(others)}:
        if name not in pipeline.stages:
            told = f"{others_at}.{name}: unknown stage{suggest(name, pipeline.stages)}"
            raise ApiError.bad_request(told, param=f"{others_at}.{name}")
        told_of = {key: names.get(key, key) for key in fields} if name == stage else {}
        told_of |= {key: f"{others_at}.{name}.{key}" for key in others.get(name, {})}
        told_of_stages[name] = told_of
        given = {**(fields if name == stage else {}), **others.get(name, {})}
        own = pipeline.stages[name].sampling
        if own is None and given.keys() - {"truncate_prompt_tokens"}:
            raise ApiError.bad_request(
                f"{next(iter(told_of.values()))}: the stage {name!r} does not sample",
                param=next(iter(told_of.values())),
            )
        if given:
            merged[name] = _merge(own or SamplingParams(max_tokens=0), given, told_of)
    try:
        return pipeline.merge_sampling(merged)
    except PlacedError as error:
        at, *keys = map(str, error.place)
        # Where the client has said nothing of it, it is the stage's own, or of several fields.
        param = told_of_stages.get(at, {}).get(keys[0]) if keys else None
        raise ApiError.bad_request(str(error), param=param) from error


def _merge(
    own: SamplingParams, given: Mapping[str, Any], told_of: Mapping[str, str]
) -> SamplingParams:
    changed = own.model_dump(mode="json") | dict(given)
    try:
        return SamplingParams.model_validate_json(json.dumps(changed), strict=True)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        told = explain_validation_error(error, SamplingParams, changed).split("\n")[0]
        if not finding["loc"]:  # two fields that do not go together
            raise ApiError.bad_request(told) from error
        key = str(finding["loc"][0])
        name = told_of.get(key, key)
        raise ApiError.bad_request(name + told.removeprefix(key), param=name) from error
