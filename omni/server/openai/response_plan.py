"""What the wishes of a session mean to the stages of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni.server.openai.sampling_fields import merge_sampling
from omni.server.openai.spoken_sound import check_voice, speaking_stage
from omni.server.openai.written_text import text_stage
from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from engine import SamplingParams
    from omni.pipelines.pipeline import Pipeline
    from omni.server.openai.realtime_events import ResponseWish

__all__ = ["ResponsePlan", "planned"]


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """How a pipeline is to answer.

    Attributes:
        writer: the stage whose text answers.
        voice: the stage whose sound answers; None where text alone is wanted.
        speaker: whose voice; None leaves it to the pipeline.
        output_rate: samples a second of the sound that is told; None: as it is made.
        sampling: by stage.
    """

    writer: str
    voice: str | None
    speaker: str | None
    output_rate: int | None
    sampling: Mapping[str, SamplingParams]


def planned(pipeline: Pipeline, wish: ResponseWish, place: str) -> ResponsePlan:
    """Find out how to answer, before anything was said.

    Args:
        pipeline: that answers.
        wish: of the client.
        place: where it stands in an event: ``session`` or ``response``.

    Raises:
        ApiError: with status 400: the pipeline cannot answer like that.
    """
    writer = text_stage(pipeline)
    output = wish.audio.output if wish.audio is not None else None
    speaker = output.voice if output is not None else None
    is_spoken = wish.output_modalities == ["audio"]
    # Of a pipeline that speaks, before it is asked to; to others clients may name any.
    if is_spoken or pipeline.voices.speaks:
        check_voice(pipeline, speaker, f"{place}.audio.output.voice")
    voice = None
    if is_spoken:
        voice = speaking_stage(pipeline, f"{place}.output_modalities")
    fields: dict[str, int] = {}
    if pipeline.stages[writer].sampling is not None:
        fields["n"] = 1  # whatever the stage's own is
    if isinstance(wish.max_output_tokens, int):
        fields["max_tokens"] = wish.max_output_tokens
    names = {"max_tokens": f"{place}.max_output_tokens"}
    others = wish.stages or {}
    sampling = merge_sampling(pipeline, writer, fields, others, names, f"{place}.stages")
    if writer in sampling and sampling[writer].n != 1:
        at = f"{place}.stages.{writer}.n"
        raise ApiError.bad_request(f"{at}: a conversation goes on in one way only", param=at)
    rate = output.format.rate if output is not None and output.format is not None else None
    return ResponsePlan(writer, voice, speaker if voice is not None else None, rate, sampling)
