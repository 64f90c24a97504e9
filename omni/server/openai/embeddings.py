"""Embeddings: one row per input text."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from omni.server.openai.answers import as_json
from omni.server.openai.chat_request import PromptList, RequestFields, merge_sampling, prompts_of
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import Unsupported
from omni.server.serving.response_stream import PipelineResponse
from stages import StageOutput

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline

_POOLED = "pooled"


class EmbeddingsRequest(RequestFields):
    """A request for embeddings, to a pipeline with an encoder that outputs tensors to the user.

    ``encoding_format`` is numbers, or base64 of little-endian float32. Rows are truncated to the
    first ``dimensions``, and then normalized to length 1.
    """

    without_effect: ClassVar = frozenset(("user", "request_id"))
    not_supported: ClassVar = {
        "add_special_tokens": Unsupported("give token ids as the input instead", (True,)),
        "embed_dtype": Unsupported("embeddings are float32", ("float32",)),
        "normalize": Unsupported("embeddings have length 1", (True,)),
        "messages": Unsupported("give the text as the input"),
    }

    model: str
    input: PromptList
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    truncate_prompt_tokens: int | None = None


class Embeddings(PipelineResponse):
    """The response to a request for embeddings."""

    prompt_param = "input"

    def __init__(self, request: Request, body: EmbeddingsRequest) -> None:
        super().__init__(request, body.model)
        self._stage = _encoding_stage(self.stages)
        self._is_base64 = body.encoding_format == "base64"
        self._width = body.dimensions
        length = body.truncate_prompt_tokens
        given = {} if length is None else {"truncate_prompt_tokens": length}
        sampling = merge_sampling(self.stages, self._stage, given, {}, {})
        prompts = prompts_of(body.input, self.server.settings.limits.max_prompts, "input")
        self._requests = [
            self.client.request(prompt, sampling, index=index, **body.scheduling)
            for index, prompt in enumerate(prompts)
        ]

    async def whole(self) -> Response:
        """Return all embeddings, without waiting for later stages."""
        async with self.stream(self._requests, [self._stage]) as stream:
            outputs = [last[self._stage] for last in await stream.last_outputs()]
        num_tokens = sum(output.num_prompt_tokens for output in outputs)
        answer = {
            "object": "list",
            "model": self.pipeline.name,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._row(output)}
                for index, output in enumerate(outputs)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return Response(as_json(answer), media_type="application/json")

    def _row(self, output: StageOutput) -> list[float] | str:
        row = output.tensors[_POOLED].float().numpy()
        if self._width is not None:
            if self._width > len(row):
                raise ApiError.bad_field("dimensions", f"the model's rows have {len(row)}")
            row = row[: self._width]
            row = row / max(np.linalg.norm(row), np.finfo(row.dtype).tiny)
        if self._is_base64:
            return b64encode(np.ascontiguousarray(row, dtype="<f4").tobytes()).decode()
        return row.tolist()


def _encoding_stage(pipeline: Pipeline) -> str:
    """Return the first stage that reads the user's prompt and outputs ``pooled`` to the user."""
    for name, stage in pipeline.stages.items():
        pools = stage.outputs is None or _POOLED in stage.outputs
        if stage.inputs is None and pools and "tensors" in stage.final_output:
            return name
    reason = "none of this model's stages reads the prompt and gives the tensor 'pooled'"
    raise ApiError.bad_request(reason, param="model")
