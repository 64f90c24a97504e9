"""Runs requests with and without caches, and compares everything that comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine import SamplingParams
from omni.omni import Omni
from omni.orchestrator import Orchestrator
from omni.output_comparison import compare_outputs
from omni.pipeline import Pipeline
from omni.request import OmniRequest
from omni.verify_report import Difference, NearTie, Run, StageVerification, VerifyReport
from stages import StageOutput, StageStats

__all__ = ["verify"]


def verify(
    omni: Omni, requests: Sequence[OmniRequest], *, atol: float | None = None
) -> VerifyReport:
    """Show that caching changes nothing, on the user's own requests, and what it saves.

    After a warm-up, the requests run three times: uncached; with caches that start empty (requests
    may hit each other's blocks); and once more with the caches that are warm now. Both cached runs
    are compared with the uncached one, request by request and stage by stage, stages that only feed
    others included: token ids, finish reasons, errors, and tensors (see
    :func:`~omni.output_comparison.tensor_tolerance`).

    A request that samples without a seed is given one, so that all runs draw the same. Greedy ones
    report log-probabilities: where two tokens are equally likely but for rounding, runs may part
    ways rightly. Such near ties are reported apart, and that request is not compared any further.

    Args:
        omni: no request may be running. Its caches are reset, and left warm.
        requests: what to run.
        atol: replaces the tolerance for tensors, for all element types.

    Raises:
        ValueError: there are no requests, two share an id, or ``atol`` is negative.
        RuntimeError: requests are running, or ``omni`` is closed.
    """
    if not requests:
        raise ValueError("there is nothing to verify: no request was given")
    if atol is not None and not atol >= 0:
        raise ValueError(f"atol must not be negative, got {atol}")
    with omni.paused() as pipeline:
        prepared = [_prepare(pipeline, index, each) for index, each in enumerate(requests)]
        ids = [request.request_id for request in prepared]
        twice = sorted({str(request_id) for request_id in ids if ids.count(request_id) > 1})
        if twice:
            raise ValueError(f"two requests share the request_id {twice[0]!r}")
        switches = {name: stage.enable_prefix_caching for name, stage in pipeline.stages.items()}
        try:
            # Threads and buffers that libraries set up on first use would count as time saved.
            _run(pipeline, prepared[:1], caching=False)
            uncached = _run(pipeline, prepared, caching=False)
            for stage in pipeline.stages.values():
                stage.reset_prefix_cache()
            cold = _run(pipeline, prepared, caching=True)
            warm = _run(pipeline, prepared, caching=True)
        finally:
            for name, stage in pipeline.stages.items():
                stage.enable_prefix_caching = switches[name]
    return _report(pipeline, prepared, uncached, {"cold": cold, "warm": warm}, atol)


@dataclass(slots=True)
class _Pass:
    """What one run of all requests put out.

    Attributes:
        outputs: ``(request_id, stage) -> output``, of stages that finished.
        errors: ``request_id -> error``.
        work: what every stage did in this run.
    """

    outputs: dict[tuple[str, str], StageOutput] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    work: dict[str, StageStats] = field(default_factory=dict)


def _prepare(pipeline: Pipeline, index: int, request: OmniRequest) -> OmniRequest:
    """The same request with an id, a seed where it draws, and log-probabilities where not."""
    sampling = dict(request.sampling)
    for name, stage in pipeline.stages.items():
        if stage.sampling is None:
            continue
        try:
            params = stage.merge_sampling(sampling.get(name, {}))
        except ValueError:
            continue  # the request fails with this error in each of the three runs
        changes: dict[str, int] = {}
        if params.is_greedy:
            changes["logprobs"] = max(params.logprobs or 0, 2)
        elif params.seed is None:
            digest = hashlib.sha256(f"{index}/{name}".encode()).digest()
            changes["seed"] = int.from_bytes(digest[:7])
        sampling[name] = params.model_copy(update=changes)
    return replace(request, request_id=request.request_id or f"verify-{index}", sampling=sampling)


def _run(pipeline: Pipeline, requests: Sequence[OmniRequest], *, caching: bool) -> _Pass:
    done = _Pass()

    def keep(output: StageOutput) -> None:
        done.outputs[output.request_id, output.stage] = output

    for stage in pipeline.stages.values():
        stage.enable_prefix_caching = caching
    before = {name: stage.stats() for name, stage in pipeline.stages.items()}
    orchestrator = Orchestrator(pipeline, on_stage_output=keep)
    try:
        for request in requests:
            try:
                orchestrator.add_request(request)
            except ValueError as error:
                done.errors[str(request.request_id)] = str(error)
        while orchestrator.has_unfinished_requests:
            for output in orchestrator.step():
                if output.finished and output.error is not None:
                    done.errors[output.request_id] = output.error
    finally:
        for request_id in orchestrator.live_request_ids:
            orchestrator.abort(request_id)
    done.work = {name: stage.stats().since(before[name]) for name, stage in pipeline.stages.items()}
    return done


def _report(
    pipeline: Pipeline,
    requests: Sequence[OmniRequest],
    uncached: _Pass,
    cached: Mapping[Run, _Pass],
    atol: float | None,
) -> VerifyReport:
    differences: list[Difference] = []
    ties: list[NearTie] = []
    max_abs_diff = dict.fromkeys(pipeline.order, 0.0)
    for request in requests:
        for run, outcome in cached.items():
            request_id = str(request.request_id)
            ours, theirs = uncached.errors.get(request_id), outcome.errors.get(request_id)
            if ours != theirs:
                message = f"error is {theirs!r}, without caching {ours!r}"
                differences.append(Difference(request_id, None, run, "error", message))
            if ours is not None or theirs is not None:
                continue
            parted: set[str] = set()
            for name, stage in pipeline.stages.items():
                if stage.inputs is not None and parted & set(stage.inputs.sources):
                    parted.add(name)
                    continue
                found = compare_outputs(
                    uncached.outputs[request_id, name],
                    outcome.outputs[request_id, name],
                    run,
                    sampling=_sampling_of(pipeline, request, name),
                    dtype=stage.dtype,
                    atol=atol,
                )
                differences += found.differences
                max_abs_diff[name] = max(max_abs_diff[name], found.max_abs_diff)
                if found.near_tie is not None:
                    ties.append(found.near_tie)
                    parted.add(name)
    return VerifyReport(
        num_requests=len(requests),
        stages=tuple(
            StageVerification(
                stage=name,
                prompt_tokens=uncached.work[name].prompt_tokens,
                cold_hit_tokens=cached["cold"].work[name].cached_tokens,
                warm_hit_tokens=cached["warm"].work[name].cached_tokens,
                max_abs_diff=max_abs_diff[name],
                uncached_s=uncached.work[name].busy_s,
                cold_s=cached["cold"].work[name].busy_s,
                warm_s=cached["warm"].work[name].busy_s,
            )
            for name in pipeline.order
        ),
        differences=tuple(differences),
        near_ties=tuple(ties),
        failures=tuple(uncached.errors.items()),
    )


def _sampling_of(pipeline: Pipeline, request: OmniRequest, stage: str) -> SamplingParams | None:
    override = request.sampling.get(stage)
    return None if override is None else pipeline.stages[stage].merge_sampling(override)
