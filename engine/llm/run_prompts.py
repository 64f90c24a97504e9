"""Runs prompts through an engine that is idle, from beginning to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from engine.interface.arguments import check_argument, check_sampling_argument
from engine.interface.engine import Engine
from engine.interface.outputs import RequestOutput
from engine.interface.prompts import Prompt, SpeechPrompt
from engine.interface.sampling_params import SamplingParams

__all__ = ["run_prompts", "stream_prompt"]


def run_prompts(
    engine: Engine[RequestOutput],
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
) -> list[RequestOutput]:
    """See :meth:`~engine.llm.llm_engine.LLMEngine.generate`."""
    _check_free(engine, "generate")
    batch = _as_list(prompts)
    for prompt in batch:
        _check_whole(prompt)
    if sampling is None or isinstance(sampling, SamplingParams):
        params = [sampling] * len(batch)
    else:
        if isinstance(sampling, Mapping):
            check_sampling_argument(sampling)
        wanted = "SamplingParams, or a list of one for each prompt"
        check_argument("sampling", sampling, Sequence, wanted)
        params = list(sampling)
    if len(params) != len(batch):
        raise ValueError(f"got {len(batch)} prompts but {len(params)} sampling parameters")
    ids = [f"generate-{index}" for index in range(len(batch))]
    done: dict[str, RequestOutput] = {}
    has_entered = engine.ownership.enter()
    try:
        for request_id, prompt, param in zip(ids, batch, params, strict=True):
            engine.add_request(request_id, prompt, param)
        while len(done) < len(ids):
            done.update({o.request_id: o for o in engine.step() if o.finished})
    finally:
        for request_id in ids:
            engine.abort(request_id)
        if has_entered:
            engine.ownership.leave()
    return [done[request_id] for request_id in ids]


def stream_prompt(
    engine: Engine[RequestOutput], prompt: Prompt, sampling: SamplingParams | None
) -> Iterator[RequestOutput]:
    """See :meth:`~engine.llm.llm_engine.LLMEngine.stream`."""
    _check_free(engine, "stream")
    _check_whole(prompt)
    request_id = "stream"
    engine.add_request(request_id, prompt, sampling)
    try:
        while request_id in engine.live_request_ids:
            for output in engine.step():
                if output.request_id == request_id:
                    yield output
    finally:
        engine.abort(request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    given: object = prompts
    if isinstance(prompts, Prompt):
        return [prompts]
    # A mapping would run as well: each of its keys as a prompt.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ValueError(
            "prompts must be a prompt (such as a str, TextPrompt or TokensPrompt), or a list of "
            f"these, got {type(given).__name__}"
        )
    return list(prompts)


def _check_free(engine: Engine[RequestOutput], method: str) -> None:
    engine.ownership.check()
    if (owner := engine.ownership.owner_name) is not None:
        raise RuntimeError(
            f"{method} drives the engine alone, but it belongs to {owner}: hand requests to the "
            "pipeline, or build another engine"
        )
    live = len(engine.live_request_ids)
    if live:
        raise ValueError(
            f"{method} drives the engine alone, but {live} requests are live: "
            "finish or abort them first, or use add_request and step for all"
        )


def _check_whole(prompt: Prompt) -> None:
    if isinstance(prompt, SpeechPrompt) and not prompt.is_last:
        raise ValueError(
            "the prompt is the first of several chunks (is_last=False): use add_request, "
            "extend_request and step, so that the others can come"
        )
