"""Runs requests with and without caches, compares all outputs, and reports differences."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine import SamplingParams
from engine.interface.outputs import ROW_KEYS
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest, Requests, as_requests
from omni.runtime.omni import Omni
from omni.runtime.orchestrator import Orchestrator
from stages import StageOutput, StageStats

Run = Literal["regrouped", "cold", "warm"]
"""Runs that are compared with the uncached one: ``regrouped`` is uncached, batched with other
requests; ``cold`` starts with empty caches and fills them; ``warm`` repeats them and hits."""

REFERENCE: Mapping[Run, str] = {
    "regrouped": "batched together",
    "cold": "without caching",
    "warm": "without caching",
}
"""Name of the uncached run in messages about each of the runs."""

Kind = Literal["tokens", "finish_reason", "logprobs", "tensor", "error"]
"""Kinds of differences."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between an output of a run and that of the uncached run.

    Attributes:
        stage: the stage of the output; None if it concerns the whole request.
    """

    request_id: str
    stage: str | None
    run: Run
    kind: Kind
    message: str


@dataclass(frozen=True, slots=True)
class NearTie:
    """A position where two tokens were equally likely up to rounding, and the runs diverged.

    Attributes:
        token_ids: the choices of the uncached run and of the other run.
        gap: difference of their log-probabilities in the uncached run.
    """

    request_id: str
    stage: str
    run: Run
    position: int
    token_ids: tuple[int, int]
    gap: float


@dataclass(frozen=True, slots=True)
class TensorVerification:
    """One tensor of a stage over all requests.

    Differences are relative to the largest element of their row, or to 1 if that is larger.

    Attributes:
        max_difference: maximum between a cached and an uncached element.
        noise: maximum between uncached runs in different batches; None if not measured.
    """

    name: str
    max_difference: float
    tolerance: float
    noise: float | None


@dataclass(frozen=True, slots=True)
class StageVerification:
    """One stage over all requests.

    Attributes:
        prompt_tokens: tokens of its inputs in one run.
        cold_hit_tokens: number of these that were prefix hits in the cold run.
        warm_hit_tokens: number of these that were prefix hits in the warm run.
        encoder_hits: encodings of images, audio and other media that hit in the cached runs.
        uncached_s, cold_s, warm_s: busy seconds in each run.
        has_cache: true if the stage caches anything that a later request could hit.
        is_cached: true if caching is enabled in its settings; otherwise it was not tested.
    """

    stage: str
    prompt_tokens: int
    cold_hit_tokens: int
    warm_hit_tokens: int
    tensors: tuple[TensorVerification, ...]
    uncached_s: float
    cold_s: float
    warm_s: float
    has_cache: bool = True
    encoder_hits: int = 0
    is_cached: bool = True

    @property
    def has_hits(self) -> bool:
        """True if anything cached was used; otherwise the comparison proves nothing."""
        return bool(self.cold_hit_tokens or self.warm_hit_tokens or self.encoder_hits)

    @property
    def saved_s(self) -> float:
        """Seconds saved by a warm cache; negative if it cost time, 0 without a cache."""
        return self.uncached_s - self.warm_s if self.has_cache and self.is_cached else 0.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The whole comparison.

    Attributes:
        stages: in topological order.
        near_ties: token differences that rounding explains; not counted as differences.
        failures: ``(request_id, error)`` of requests that failed in the uncached run. Failing
            the same way with caches is no difference.
    """

    num_requests: int
    stages: tuple[StageVerification, ...]
    differences: tuple[Difference, ...]
    near_ties: tuple[NearTie, ...]
    failures: tuple[tuple[str, str], ...]

    @property
    def equal(self) -> bool:
        """True if no output differed, neither with caches nor in different batches."""
        return not self.differences

    @property
    def has_hits(self) -> bool:
        """True if any stage had a cache hit. Without a hit nothing was proven."""
        return any(stage.has_hits for stage in self.stages)

    def lines(self) -> list[str]:
        """Format the report as lines of text."""
        return [
            *self._verdict(),
            *(line for stage in self.stages for line in _stage_lines(stage)),
            *(
                f"difference: request {each.request_id!r}"
                f"{'' if each.stage is None else f', stage {each.stage!r}'}, "
                f"{_run_name(each.run)}: {each.message}"
                for each in self.differences
            ),
            *(
                f"near tie: request {tie.request_id!r}, stage {tie.stage!r}, {_run_name(tie.run)}: "
                f"generated token {tie.position} is {tie.token_ids[0]} or {tie.token_ids[1]}, "
                f"whose log-probabilities are {tie.gap:.1e} apart; not compared from there on"
                for tie in self.near_ties
            ),
            *(
                f"failed without caching, not compared: request {request_id!r}: {error}"
                for request_id, error in self.failures
            ),
        ]

    def _verdict(self) -> list[str]:
        regrouped = sum(each.run == "regrouped" for each in self.differences)
        cached = len(self.differences) - regrouped
        compared = self.num_requests - len(self.failures)
        lines = [
            f"cached DIFFERS from uncached in {cached} places"
            if cached
            else f"cached equals uncached: {compared} of {self.num_requests} requests compared"
        ]
        if self.equal and not self.has_hits:
            why = (
                "no request used anything that was cached, and all runs did the same work. Whole "
                "blocks of block_size tokens are cached: give longer prompts, which hit when they "
                "run again"
            )
            if not any(stage.has_cache and stage.is_cached for stage in self.stages):
                why = "no stage has a cache that its settings turn on"
            lines.insert(0, f"NOTHING WAS PROVEN: {why}")
        if regrouped:
            lines.append(
                f"outputs DEPEND ON BATCH MATES, without any caching, in {regrouped} places"
            )
        return lines


def _run_name(run: Run) -> str:
    return "uncached with other batch mates" if run == "regrouped" else f"{run} cache"


def _stage_lines(stage: StageVerification) -> list[str]:
    if not stage.has_cache:  # differences of its times are noise
        hits, saved = "no cache of its own: computed again in every run", ""
    elif not stage.is_cached:
        hits, saved = "caching is off in its settings: its cache was not tested", ""
    else:
        hits = f"hits {stage.cold_hit_tokens} cold and {stage.warm_hit_tokens} warm"
        if stage.encoder_hits:
            hits += f", {stage.encoder_hits} encodings found"
        if not stage.has_hits:
            hits += ": nothing was proven of this stage"
        # Equal runs differ in time, too: a negative difference is only noise.
        saved = f", {stage.saved_s:.3f} saved" if stage.saved_s > 0 else ", nothing saved"
    return [
        f"stage {stage.stage!r}: {stage.prompt_tokens} input tokens, {hits}",
        f"  seconds: {stage.uncached_s:.3f} uncached, {stage.cold_s:.3f} cold, "
        f"{stage.warm_s:.3f} warm{saved}",
        *(
            f"  {tensor.name}: largest difference {tensor.max_difference:.1e}, allowed "
            f"{tensor.tolerance:.1e}"
            f"{'' if tensor.noise is None else f', noise {tensor.noise:.1e}'}"
            for tensor in stage.tensors
        ),
    ]


WAVEFORM = "waveform"
"""Name of a stage's audio among the compared tensors."""

# Noise is measured on a few requests; the maximum over all requests may be larger.
_NOISE_FACTOR = 4.0


class _Limits(NamedTuple):
    """Limits of rounding errors in one element type.

    Attributes:
        tensor: difference that is always allowed in tensors.
        tensor_noise: maximum difference that is attributed to rounding.
        tie: difference that is always allowed between log-probabilities.
        tie_noise: maximum difference of log-probabilities that is attributed to rounding.
    """

    tensor: float
    tensor_noise: float
    tie: float
    tie_noise: float


# Sums round differently for different batch shapes: by a few units in the last place of a type's
# 53, 24, 11 or 8 significant bits. Deep models amplify that by an unknown factor.
_LIMITS = {
    torch.float64: _Limits(1e-5, 1e-5, 1e-4, 1e-4),
    torch.float32: _Limits(1e-5, 1e-3, 1e-4, 1e-2),
    torch.float16: _Limits(1e-2, 5e-2, 2e-2, 1e-1),
    torch.bfloat16: _Limits(5e-2, 1e-1, 1e-1, 5e-1),
}
_EXACT = _Limits(0.0, 0.0, 0.0, 0.0)

# Quantization step of samples in a WAV file: smaller differences do not matter. Of
# hundreds of answers in one batch, a few differed by more than 1e-5 with a measured noise of zero.
_SAMPLE_STEP = 2.0**-15


@dataclass(slots=True)
class Spread:
    """Maximum differences between outputs of one stage.

    Attributes:
        tensors: per tensor, the maximum difference between elements, relative to the largest
            element of their row (or to 1, if that is larger).
        logprobs: the maximum difference between log-probabilities of generated tokens.
    """

    tensors: dict[str, float] = field(default_factory=dict)
    logprobs: float = 0.0

    def include(self, other: Spread) -> None:
        """Update the maxima with those of another spread."""
        for name, apart in other.tensors.items():
            self.tensors[name] = max(self.tensors.get(name, 0.0), apart)
        self.logprobs = max(self.logprobs, other.logprobs)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum differences with which outputs of one stage count as equal.

    No constant is right for all models: rounding errors grow with depth and width. So four times
    the *noise* is allowed, which is the change by batching alone in uncached runs. It is limited
    by element type: at least 1e-5 is allowed in float32 (1e-2 in float16, 5e-2 in bfloat16), and
    noise above 1e-3 (5e-2, 1e-1) is capped. A waveform may always differ by one step of 16-bit
    samples, 2 ** -15. Integers must be equal.

    Attributes:
        atol: replaces all of this for tensors.
        exact: every bit must be equal, including log-probabilities, and near ties are differences.
        noise: the measured noise; empty if not measured.
        measuring: true for the run that measures the noise: the cap itself is allowed.
    """

    atol: float | None = None
    exact: bool = False
    noise: Spread = field(default_factory=Spread)
    measuring: bool = False

    def tensor(self, name: str, dtype: torch.dtype) -> float:
        """Return the allowed difference, relative to a row's largest element, or 1 if larger."""
        if self.exact:
            return 0.0
        if self.atol is not None:
            return self.atol
        limits = _LIMITS.get(dtype, _EXACT)
        minimum = max(limits.tensor, _SAMPLE_STEP) if name == WAVEFORM else limits.tensor
        return self._allowed(self.noise.tensors.get(name, 0.0), minimum, limits.tensor_noise)

    def tie(self, dtype: torch.dtype | None) -> float:
        """Return the gap of log-probabilities below which rounding may decide between tokens."""
        limits = _LIMITS.get(dtype or torch.float32, _EXACT)
        return self._allowed(self.noise.logprobs, limits.tie, limits.tie_noise)

    def _allowed(self, noise: float, minimum: float, max_noise: float) -> float:
        return max_noise if self.measuring else max(minimum, _NOISE_FACTOR * min(noise, max_noise))


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LOGIT_CHANGES = ("min_tokens", *_PENALTIES, "suppress_token_ids", "logit_bias", "n")


def compare_outputs(
    uncached: StageOutput,
    other: StageOutput,
    run: Run,
    *,
    sampling: SamplingParams | None,
    dtype: torch.dtype | None,
    tolerance: Tolerance,
) -> Comparison:
    """Compare a request's outputs of one stage."""
    found = Comparison(uncached, other, run, tolerance)
    pairs = enumerate(itertools.zip_longest(uncached.token_ids, other.token_ids))
    position = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
    found.logprobs(position)
    if position is not None and not tolerance.exact:
        found.near_tie = found.tie_at(position, sampling, tolerance.tie(dtype))
        if found.near_tie is not None:
            # Rows of the tokens before the tie had the same input in both runs.
            found.tensors(uncached.num_prompt_tokens + position)
            return found
    found.tokens(position)
    found.finish()
    found.tensors(None)
    found.audio()
    return found


@dataclass(slots=True)
class Comparison:
    """Compares the aspects of two outputs one by one, and collects the results.

    Attributes:
        differences: differences found.
        near_tie: position where the tokens diverge by rounding alone, or None.
        spread: maximum differences of all compared values, whether allowed or not.
    """

    uncached: StageOutput
    other: StageOutput
    run: Run
    tolerance: Tolerance
    differences: list[Difference] = field(default_factory=list)
    near_tie: NearTie | None = None
    spread: Spread = field(default_factory=Spread)

    def tie_at(
        self, position: int, sampling: SamplingParams | None, max_gap: float
    ) -> NearTie | None:
        """Return the near tie that explains the divergence, if the uncached logprobs show one.

        Only plain greedy choices can be explained: with penalties or random sampling, the choice
        was not made by the log-probabilities.
        """
        ours, theirs = self.uncached, self.other
        if sampling is None or not _is_plain_greedy(sampling) or ours.logprobs is None:
            return None
        if position >= min(len(ours.token_ids), len(theirs.token_ids)):
            return None
        choices = ours.token_ids[position], theirs.token_ids[position]
        top = dict(ours.logprobs[position].top)
        if not all(token in top for token in choices):
            return None
        gap = abs(top[choices[0]] - top[choices[1]])
        if gap >= max_gap:
            return None
        return NearTie(ours.request_id, ours.stage, self.run, position, choices, gap)

    def tokens(self, position: int | None) -> None:
        """Compare generated ids and texts of all completions."""
        exact = self.tolerance.exact
        if position is not None:
            ours, theirs = (_at(each.token_ids, position) for each in (self.uncached, self.other))
            self._unequal("tokens", f"generated token {position} is", ours, theirs)
        elif _further(self.uncached, exact) != _further(self.other, exact):
            self._differ("tokens", "further completions (n > 1) are not the same")
        elif self.uncached.text != self.other.text:
            self._unequal("tokens", "text is", repr(self.uncached.text), repr(self.other.text))

    def finish(self) -> None:
        """Compare finish reasons."""
        ours, theirs = self.uncached.finish_reason, self.other.finish_reason
        if ours != theirs:
            self._unequal("finish_reason", "finish reason is", ours, theirs)

    def logprobs(self, position: int | None) -> None:
        """Measure differences before the token where the runs diverge; if exact, compare bits."""
        pairs = zip(self.uncached.logprobs or (), self.other.logprobs or (), strict=False)
        for index, (ours, theirs) in enumerate(itertools.islice(pairs, position)):
            apart = abs(ours.logprob - theirs.logprob)
            self.spread.logprobs = max(self.spread.logprobs, apart)
            if self.tolerance.exact and ours != theirs:
                what = f"log-probabilities of generated token {index} are"
                self._unequal("logprobs", what, ours, theirs)
                break

    def tensors(self, rows: int | None) -> None:
        """Compare names, shapes and elements; if given, only of the first ``rows`` rows."""
        for name in sorted(self.uncached.tensors.keys() ^ self.other.tensors.keys()):
            where = (
                REFERENCE[self.run] if name in self.uncached.tensors else f"in the {self.run} run"
            )
            self._differ("tensor", f"tensor {name!r} is there only {where}")
        # Row keys change with every reset: they identify rows, and are not content.
        for name in sorted((self.uncached.tensors.keys() & self.other.tensors.keys()) - {ROW_KEYS}):
            ours, theirs = self.uncached.tensors[name], self.other.tensors[name]
            if rows is None:
                self._tensor(name, ours, theirs)
            elif min(len(ours), len(theirs)) >= rows:
                self._tensor(name, ours[:rows], theirs[:rows])

    def audio(self) -> None:
        """Compare the whole waveform, as a tensor of that name."""
        ours, theirs = self.uncached.audio, self.other.audio
        if ours is not None and theirs is not None:
            if ours.sampling_rate != theirs.sampling_rate:
                self._differ(
                    "tensor",
                    f"{WAVEFORM} has {theirs.sampling_rate} samples per second, "
                    f"{REFERENCE[self.run]} {ours.sampling_rate}",
                )
            self._tensor(WAVEFORM, ours.samples, theirs.samples)
        elif ours is not theirs:
            where = REFERENCE[self.run] if theirs is None else f"in the {self.run} run"
            self._differ("tensor", f"a {WAVEFORM} is there only {where}")

    def _tensor(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = (f"{tuple(each.shape)} {each.dtype}" for each in (ours, theirs))
            self._unequal("tensor", f"tensor {name!r} is", *kinds)
            return
        if ours.numel() == 0:
            return
        apart, scale = _distance(ours, theirs)
        allowed = self.tolerance.tensor(name, ours.dtype)
        shares = apart / scale
        self.spread.include(Spread({name: float(shares.max())}))
        differs = shares > allowed
        if self.tolerance.exact:
            differs = (_bits(ours) != _bits(theirs)).reshape(len(shares), -1).any(dim=1)
        if wrong := int(differs.sum()):
            worst = int((shares * differs).argmax())
            part = "row" if ours.dim() > 1 else "element"
            self._differ(
                "tensor",
                f"tensor {name!r} differs in {wrong} of {len(ours)} {part}s, most in {part} "
                f"{worst}: "
                f"by {float(apart[worst]):.3g}, allowed are {allowed * float(scale[worst]):.3g}",
            )

    def _unequal(self, kind: Kind, what: str, ours: object, theirs: object) -> None:
        self._differ(kind, f"{what} {theirs}, {REFERENCE[self.run]} {ours}")

    def _differ(self, kind: Kind, message: str) -> None:
        self.differences.append(
            Difference(self.uncached.request_id, self.uncached.stage, self.run, kind, message)
        )


def _further(output: StageOutput, exact: bool) -> list[tuple[object, ...]]:
    """Return all completions but the first; unless exact, without their log-probabilities."""
    return [tuple(each) if exact else each[:3] for each in output.completions[1:]]


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes, ``(elements * element size,)``, which distinguish signed zeros and NaNs."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum differences of elements, and the scales of rounding; both ``(rows,)``.

    The scale is each row's largest element, since floating point has relative precision, and a
    row's elements were summed from terms of that size; but at least 1.
    """
    ours, theirs = (each.double().reshape(each.shape[0], -1) for each in (ours, theirs))
    apart = (ours - theirs).abs()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, apart).nan_to_num(nan=torch.inf)
    scale = ours.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1)
    return apart.amax(dim=1), scale.clamp(min=1.0)


def _at(token_ids: tuple[int, ...], position: int) -> str:
    return str(token_ids[position]) if position < len(token_ids) else "not there"


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    neutral = SamplingParams()
    return sampling.is_greedy and all(
        getattr(sampling, name) == getattr(neutral, name) for name in _LOGIT_CHANGES
    )


# Number of requests that are rerun to measure noise: each costs a separate uncached run.
_NUM_REGROUPED = 4


def verify(
    omni: Omni, requests: Requests, *, atol: float | None = None, exact: bool = False
) -> VerifyReport:
    """Check on the user's own requests that caching changes no output, and measure its savings.

    After a warm-up, unless every stage has run before, the requests run three times: uncached;
    with caches that start empty (requests may hit each other's blocks); and again with the caches
    that are now warm. Both cached runs are compared with the uncached one, request by request and
    stage by stage, including stages that only feed others: token ids, finish reasons, errors,
    tensors and waveforms.

    A stage whose settings turn caching off recomputes everything in these runs too: its cache
    is not tested, and the report says so.

    A hit changes batch shapes, and so how sums round. The effect depends on the model, so it is
    measured: a few of the longest requests run uncached again in different batches, and cached
    tensors may differ from uncached ones by a small multiple of these differences (see
    ``Tolerance``). Larger ones in that run (``regrouped``) are reported, too: outputs must not
    depend on the batch.

    A request that samples without a seed gets one, so that all runs sample the same tokens. Greedy
    ones report log-probabilities: if two tokens are equally likely up to rounding, runs may
    legitimately diverge. Such near ties are listed separately, and the rest is not compared.

    Args:
        omni: must have no running requests. Its caches are reset, and left warm.
        requests: one or several requests, as prompts or as :class:`OmniRequest`. If none of them
            hits, nothing is proven: see ``VerifyReport.has_hits``.
        atol: allowed difference of tensor elements in a row whose largest is 1 or less, and
            proportionally more in other rows. Replaces the measurement.
        exact: compare bits, including log-probabilities; no noise is measured, and near ties are
            differences. For pipelines of deterministic stages (``EngineConfig.deterministic``).

    Raises:
        ValueError: there are no requests or invalid ones, two share an id, or ``atol`` is negative
            or given together with ``exact``.
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
    """Return the uncached run, and the runs to compare; noise is measured if ``measures``."""
    if not all(stage.stats().num_steps for stage in pipeline.stages.values()):
        # One-time setup of threads and buffers in libraries would count as time saved.
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
    """Return the request with an id, and per stage a seed if it samples, else logprobs."""
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
    """Run requests; only stages named in ``caching`` use their caches."""
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
    """Rerun the longest requests uncached and alone; a single request together with its copy."""
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
    """Results of a comparison with the uncached run; the spreads are by stage."""

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
        diverged: set[str] = set()
        for name, stage in pipeline.stages.items():
            if stage.inputs is not None and diverged & set(stage.inputs.sources):
                diverged.add(name)
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
                diverged.add(name)
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
    dtypes, ids = _dtypes(uncached), [str(request.request_id) for request in requests]
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
        failures=tuple((each, uncached.errors[each]) for each in ids if each in uncached.errors),
    )


def _dtypes(done: _Pass) -> dict[tuple[str, str], torch.dtype]:
    """Return ``(stage, tensor) -> element type`` of all tensors that are compared by element."""
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    for (_, stage), output in done.outputs.items():
        dtypes |= {(stage, name): tensor.dtype for name, tensor in output.tensors.items()}
        if output.audio is not None:
            dtypes[stage, WAVEFORM] = output.audio.samples.dtype
    return dtypes
