"""Runs requests with and without caches, and compares everything that comes out."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest, Requests, as_requests
from omni.runtime.omni import Omni
from omni.runtime.orchestrator import Orchestrator
from omni.verification.comparison import (
    REFERENCE,
    WAVEFORM,
    Difference,
    NearTie,
    Run,
    Spread,
    StageVerification,
    TensorVerification,
    Tolerance,
    VerifyReport,
    compare_outputs,
)
from stages import StageOutput, StageStats

# Requests that are run once more to measure noise: each costs an uncached run of its own.
_NUM_REGROUPED = 4


def verify(
    omni: Omni, requests: Requests, *, atol: float | None = None, exact: bool = False
) -> VerifyReport:
    """Show that caching changes nothing, on the user's own requests, and what it saves.

    After a warm-up, unless every stage has worked before, the requests run three times: uncached;
    with caches that start empty (requests may hit each other's blocks); and once more with the
    caches that are warm now. Both cached runs are compared with the uncached one, request by
    request and stage by stage, stages that only feed others included: token ids, finish reasons,
    errors, tensors and waveforms.

    A stage whose settings turn caching off computes everything again in these runs too: its cache
    is not tested, and the report says so.

    A hit changes batches, and with their shapes how sums round. How far that carries depends on
    the model, so it is measured: a few of the longest requests run uncached once more, with other
    batch mates, and cached tensors may differ from uncached ones by a small multiple of what these
    do (see ``Tolerance``). More than rounding explains is a difference as
    well, of the run ``regrouped``: outputs must not depend on batch mates.

    A request that samples without a seed is given one, so that all runs draw the same. Greedy ones
    report log-probabilities: where two tokens are equally likely but for rounding, runs may part
    ways rightly. Such near ties are reported apart, and that request is not compared any further.

    Args:
        omni: no request may be running. Its caches are reset, and left warm.
        requests: what to run, one or several, as prompts or as :class:`OmniRequest`. Where none
            of them hits anything, nothing is proven: see ``VerifyReport.has_hits``.
        atol: how far tensor elements may be apart in a row whose largest is 1 or less; in
            proportion in others. It replaces the measurement.
        exact: compare bits, those of log-probabilities too; nothing is measured, no near tie is
            excused. For pipelines whose stages are deterministic (``EngineConfig.deterministic``).

    Raises:
        ValueError: there are no requests or what is none, two share an id, or ``atol`` is negative
            or given beside ``exact``.
        RuntimeError: requests are running, or ``omni`` is closed.
    """
    if not isinstance(omni, Omni):
        raise ValueError(f"verify runs requests over an Omni, got {omni!r}: open it first")
    batch = as_requests(requests)
    if not batch:
        raise ValueError("there is nothing to verify: no request was given")
    given = _tolerance(atol, exact)
    with omni.paused() as pipeline:
        prepared = [_prepare(pipeline, index, each) for index, each in enumerate(batch)]
        _check_ids(prepared)
        switches = {name: stage.enable_prefix_caching for name, stage in pipeline.stages.items()}
        cached = [name for name, is_on in switches.items() if is_on]
        try:
            uncached, runs = _run_all(pipeline, prepared, cached, atol is None and not exact)
        finally:
            for name, stage in pipeline.stages.items():
                stage.enable_prefix_caching = switches[name]
    return _report(pipeline, prepared, uncached, runs, given)


def _tolerance(atol: float | None, exact: bool) -> Tolerance:
    if atol is not None and not atol >= 0:
        raise ValueError(f"atol must not be negative, got {atol}")
    if exact and atol is not None:
        raise ValueError(f"exact allows no difference: leave out atol, which is {atol}")
    return Tolerance(atol, exact)


def _run_all(
    pipeline: Pipeline, requests: Sequence[OmniRequest], cached: Collection[str], measures: bool
) -> tuple[_Pass, dict[Run, _Pass]]:
    """The uncached run, and those that are compared with it; noise is measured if ``measures``."""
    if not all(stage.stats().num_steps for stage in pipeline.stages.values()):
        # Threads and buffers that libraries set up on first use would count as time saved.
        _run(pipeline, requests[:1], caching=())
    uncached = _run(pipeline, requests, caching=())
    regrouped = _regroup(pipeline, requests, uncached) if measures else _Pass()
    for stage in pipeline.stages.values():
        stage.reset_prefix_cache()
    cold = _run(pipeline, requests, caching=cached)
    warm = _run(pipeline, requests, caching=cached)
    return uncached, {"regrouped": regrouped, "cold": cold, "warm": warm}


@dataclass(slots=True)
class _Pass:
    """The outputs of one run of all requests.

    Attributes:
        outputs: ``(request_id, stage) -> output``, of stages that finished.
        errors: ``request_id -> error``.
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
            continue  # the request fails with this error in each of the runs
        changes: dict[str, int] = {}
        if params.is_greedy:
            changes["logprobs"] = max(params.logprobs or 0, 2)
        elif params.seed is None:
            digest = hashlib.sha256(f"{index}/{name}".encode()).digest()
            changes["seed"] = int.from_bytes(digest[:7])
        sampling[name] = params.model_copy(update=changes)
    return replace(request, request_id=request.request_id or f"verify-{index}", sampling=sampling)


def _check_ids(requests: Sequence[OmniRequest]) -> None:
    ids = [request.request_id for request in requests]
    twice = sorted({str(request_id) for request_id in ids if ids.count(request_id) > 1})
    if twice:
        raise ValueError(f"two requests share the request_id {twice[0]!r}")


def _run(pipeline: Pipeline, requests: Sequence[OmniRequest], *, caching: Collection[str]) -> _Pass:
    """Run requests; stages that are not named in ``caching`` cache nothing."""
    done = _Pass()

    def keep(output: StageOutput) -> None:
        done.outputs[output.request_id, output.stage] = output

    for name, stage in pipeline.stages.items():
        stage.enable_prefix_caching = name in caching
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


def _regroup(pipeline: Pipeline, requests: Sequence[OmniRequest], uncached: _Pass) -> _Pass:
    """Run the longest requests uncached and alone; a sole one, which was, beside its own copy."""
    lengths: Counter[str] = Counter()
    for (request_id, _), output in uncached.outputs.items():
        lengths[request_id] += output.num_prompt_tokens
    runnable = [each for each in requests if each.request_id not in uncached.errors]
    runnable.sort(key=lambda each: lengths[str(each.request_id)], reverse=True)
    done = _Pass()
    for request in runnable[:_NUM_REGROUPED]:
        copies = [replace(request, request_id=f"{request.request_id}-copy")]
        again = _run(pipeline, [request, *(copies if len(requests) == 1 else ())], caching=())
        done.outputs |= again.outputs
        done.errors |= again.errors
    return done


@dataclass(slots=True)
class _Findings:
    """Findings of a comparison with the uncached run; the spreads are by stage."""

    differences: list[Difference] = field(default_factory=list)
    near_ties: list[NearTie] = field(default_factory=list)
    spreads: defaultdict[str, Spread] = field(default_factory=lambda: defaultdict(Spread))


def _compare(
    pipeline: Pipeline,
    requests: Sequence[OmniRequest],
    uncached: _Pass,
    outcome: _Pass,
    run: Run,
    tolerances: Mapping[str, Tolerance],
) -> _Findings:
    found = _Findings()
    for request in requests:
        request_id = str(request.request_id)
        ours, theirs = uncached.errors.get(request_id), outcome.errors.get(request_id)
        if ours != theirs:
            message = f"error is {theirs!r}, {REFERENCE[run]} {ours!r}"
            found.differences.append(Difference(request_id, None, run, "error", message))
        if ours is not None or theirs is not None:
            continue
        parted: set[str] = set()
        for name, stage in pipeline.stages.items():
            if stage.inputs is not None and parted & set(stage.inputs.sources):
                parted.add(name)
                continue
            override = request.sampling.get(name)
            one = compare_outputs(
                uncached.outputs[request_id, name],
                outcome.outputs[request_id, name],
                run,
                sampling=None if override is None else stage.merge_sampling(override),
                dtype=stage.dtype,
                tolerance=tolerances[name],
            )
            found.differences += one.differences
            found.spreads[name].include(one.spread)
            if one.near_tie is not None:
                found.near_ties.append(one.near_tie)
                parted.add(name)
    return found


def _report(
    pipeline: Pipeline,
    requests: Sequence[OmniRequest],
    uncached: _Pass,
    runs: Mapping[Run, _Pass],
    given: Tolerance,
) -> VerifyReport:
    regrouped, cold, warm = runs["regrouped"], runs["cold"], runs["warm"]
    ran_again = {*regrouped.errors, *(request_id for request_id, _ in regrouped.outputs)}
    again = [request for request in requests if request.request_id in ran_again]
    measuring = dict.fromkeys(pipeline.order, Tolerance(measuring=True))
    of_regrouped = _compare(pipeline, again, uncached, regrouped, "regrouped", measuring)
    noise = of_regrouped.spreads
    tolerances = {name: replace(given, noise=noise[name]) for name in pipeline.order}
    of_cold = _compare(pipeline, requests, uncached, cold, "cold", tolerances)
    of_warm = _compare(pipeline, requests, uncached, warm, "warm", tolerances)
    for name, spread in of_warm.spreads.items():
        of_cold.spreads[name].include(spread)
    dtypes = _dtypes(uncached)
    return VerifyReport(
        num_requests=len(requests),
        stages=tuple(
            StageVerification(
                stage=name,
                prompt_tokens=uncached.work[name].prompt_tokens,
                cold_hit_tokens=cold.work[name].cached_tokens,
                warm_hit_tokens=warm.work[name].cached_tokens,
                tensors=tuple(
                    TensorVerification(
                        name=tensor,
                        max_difference=difference,
                        tolerance=tolerances[name].tensor(tensor, dtypes[name, tensor]),
                        noise=noise[name].tensors.get(tensor),
                    )
                    for tensor, difference in sorted(of_cold.spreads[name].tensors.items())
                ),
                uncached_s=uncached.work[name].busy_s,
                cold_s=cold.work[name].busy_s,
                warm_s=warm.work[name].busy_s,
                has_cache=pipeline.stages[name].has_cache,
                is_cached=pipeline.stages[name].enable_prefix_caching,
                encoder_hits=cold.work[name].encoder_hits + warm.work[name].encoder_hits,
            )
            for name in pipeline.order
        ),
        differences=(*of_regrouped.differences, *of_cold.differences, *of_warm.differences),
        near_ties=(*of_regrouped.near_ties, *of_cold.near_ties, *of_warm.near_ties),
        failures=tuple(uncached.errors.items()),
    )


def _dtypes(done: _Pass) -> dict[tuple[str, str], torch.dtype]:
    """``(stage, tensor) -> element type`` of all that is compared element by element."""
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    for (_, stage), output in done.outputs.items():
        dtypes |= {(stage, name): tensor.dtype for name, tensor in output.tensors.items()}
        if output.audio is not None:
            dtypes[stage, WAVEFORM] = output.audio.samples.dtype
    return dtypes
