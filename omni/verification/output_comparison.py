"""Compares a stage's output in one run with that in another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine import SamplingParams
from engine.interface.outputs import ROW_KEYS
from omni.verification.verify_report import REFERENCE, Difference, Kind, NearTie, Run
from stages import StageOutput

WAVEFORM = "waveform"
"""Name of a stage's sound among the tensors that are compared."""

# Noise is measured on a few requests; others have other rows, and their worst may be worse.
_SAFETY = 4.0


class _Limits(NamedTuple):
    """Limits of rounding in one element type.

    Attributes:
        tensor: is allowed in tensors whatever was measured.
        tensor_noise: the most that is put down to rounding.
        tie: is allowed between log-probabilities whatever was measured.
        tie_noise: the most of that that is put down to rounding.
    """

    tensor: float
    tensor_noise: float
    tie: float
    tie_noise: float


# Sums over other batch shapes round differently: a few units in the last place of a type's 53, 24,
# 11 or 8 significant bits. A deep model amplifies that, by more than is known beforehand.
_LIMITS = {
    torch.float64: _Limits(1e-5, 1e-5, 1e-4, 1e-4),
    torch.float32: _Limits(1e-5, 1e-3, 1e-4, 1e-2),
    torch.float16: _Limits(1e-2, 5e-2, 2e-2, 1e-1),
    torch.bfloat16: _Limits(5e-2, 1e-1, 1e-1, 5e-1),
}
_EXACT = _Limits(0.0, 0.0, 0.0, 0.0)

# A sample of a WAV file comes in steps of this: what is nearer is the same sound. Of hundreds of
# answers in one batch, a few were apart by more than 1e-5 where the measured noise was nought.
_SAMPLE_STEP = 2.0**-15


@dataclass(slots=True)
class Spread:
    """The largest differences between outputs of one stage.

    Attributes:
        tensors: per tensor, the largest difference between elements, as a share of the largest
            element of their row (or of 1, in a row of smaller ones).
        logprobs: the largest difference between log-probabilities of generated tokens.
    """

    tensors: dict[str, float] = field(default_factory=dict)
    logprobs: float = 0.0

    def include(self, other: Spread) -> None:
        """Widen this one to cover the other."""
        for name, apart in other.tensors.items():
            self.tensors[name] = max(self.tensors.get(name, 0.0), apart)
        self.logprobs = max(self.logprobs, other.logprobs)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest differences that outputs of one stage may have and still be equal.

    No constant is right for all models: what rounding does grows with depth and width. So four
    times the *noise* is allowed, which is what batching alone changes in uncached runs, within
    limits of the element type: at least 1e-5 in float32 (1e-2 in float16, 5e-2 in bfloat16), and
    no more than noise of 1e-3 (5e-2, 1e-1) is believed. A waveform may always differ by one step of
    16-bit samples, 2 ** -15. Integers must be equal.

    Attributes:
        atol: replaces all of this for tensors.
        noise: what was measured; empty if nothing was.
        measuring: this is for the run that measures the noise: what is believed is allowed.
    """

    atol: float | None = None
    noise: Spread = field(default_factory=Spread)
    measuring: bool = False

    def tensor(self, name: str, dtype: torch.dtype) -> float:
        """The largest difference, as a share of a row's largest element, or of 1 if larger."""
        if self.atol is not None:
            return self.atol
        limits = _LIMITS.get(dtype, _EXACT)
        least = max(limits.tensor, _SAMPLE_STEP) if name == WAVEFORM else limits.tensor
        return self._allowed(self.noise.tensors.get(name, 0.0), least, limits.tensor_noise)

    def tie(self, dtype: torch.dtype | None) -> float:
        """The gap of log-probabilities below which rounding may decide between two tokens."""
        limits = _LIMITS.get(dtype or torch.float32, _EXACT)
        return self._allowed(self.noise.logprobs, limits.tie, limits.tie_noise)

    def _allowed(self, noise: float, least: float, most_noise: float) -> float:
        return most_noise if self.measuring else max(least, _SAFETY * min(noise, most_noise))


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SWAYING = ("min_tokens", *_PENALTIES, "suppress_token_ids", "logit_bias", "n")


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
    position = _first_difference(uncached.token_ids, other.token_ids)
    found.logprobs(position)
    if position is not None:
        gap = tolerance.tie(dtype)
        found.near_tie = _near_tie(uncached, other, run, position, sampling, gap)
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
    """Compares one aspect of two outputs after the other, and keeps what it found.

    Attributes:
        differences: what is not equal.
        near_tie: where the tokens part by rounding alone, or None.
        spread: how far apart what is no difference was, and what is one.
    """

    uncached: StageOutput
    other: StageOutput
    run: Run
    tolerance: Tolerance
    differences: list[Difference] = field(default_factory=list)
    near_tie: NearTie | None = None
    spread: Spread = field(default_factory=Spread)

    def tokens(self, position: int | None) -> None:
        """Generated ids, of all completions."""
        if position is not None:
            ours, theirs = self.uncached.token_ids, self.other.token_ids
            self._differ(
                "tokens",
                f"generated token {position} is {_at(theirs, position)}, "
                f"{REFERENCE[self.run]} {_at(ours, position)}",
            )
        elif _further(self.uncached) != _further(self.other):
            self._differ("tokens", "further completions (n > 1) are not the same")
        elif self.uncached.text != self.other.text:
            self._differ(
                "tokens",
                f"text is {self.other.text!r}, {REFERENCE[self.run]} {self.uncached.text!r}",
            )

    def finish(self) -> None:
        """Compare finish reasons."""
        if self.uncached.finish_reason != self.other.finish_reason:
            self._differ(
                "finish_reason",
                f"finish reason is {self.other.finish_reason}, "
                f"{REFERENCE[self.run]} {self.uncached.finish_reason}",
            )

    def logprobs(self, position: int | None) -> None:
        """Measure those of the tokens before the one at which the runs part."""
        pairs = zip(self.uncached.logprobs or (), self.other.logprobs or (), strict=False)
        for ours, theirs in itertools.islice(pairs, position):
            apart = abs(ours.logprob - theirs.logprob)
            self.spread.logprobs = max(self.spread.logprobs, apart)

    def tensors(self, rows: int | None) -> None:
        """Names, shapes and elements; of the leading ``rows`` only if given."""
        for name in sorted(self.uncached.tensors.keys() ^ self.other.tensors.keys()):
            where = (
                REFERENCE[self.run] if name in self.uncached.tensors else f"in the {self.run} run"
            )
            self._differ("tensor", f"tensor {name!r} is there only {where}")
        # Keys are others after every reset: they name rows, and are none.
        for name in sorted((self.uncached.tensors.keys() & self.other.tensors.keys()) - {ROW_KEYS}):
            ours, theirs = self.uncached.tensors[name], self.other.tensors[name]
            if rows is None:
                self._tensor(name, ours, theirs)
            elif min(len(ours), len(theirs)) >= rows:
                self._tensor(name, ours[:rows], theirs[:rows])

    def audio(self) -> None:
        """The whole waveform, as a tensor of that name."""
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
            self._differ(
                "tensor",
                f"tensor {name!r} is {tuple(theirs.shape)} {theirs.dtype}, "
                f"{REFERENCE[self.run]} {tuple(ours.shape)} {ours.dtype}",
            )
            return
        if ours.numel() == 0:
            return
        apart, scale = _distance(ours, theirs)
        allowed = self.tolerance.tensor(name, ours.dtype)
        shares = apart / scale
        self.spread.include(Spread({name: float(shares.max())}))
        if wrong := int((shares > allowed).sum()):
            worst = int(shares.argmax())
            part = "row" if ours.dim() > 1 else "element"
            self._differ(
                "tensor",
                f"tensor {name!r} differs in {wrong} of {len(ours)} {part}s, most in {part} "
                f"{worst}: "
                f"by {float(apart[worst]):.3g}, allowed are {allowed * float(scale[worst]):.3g}",
            )

    def _differ(self, kind: Kind, message: str) -> None:
        self.differences.append(
            Difference(self.uncached.request_id, self.uncached.stage, self.run, kind, message)
        )


def _further(output: StageOutput) -> list[tuple[object, ...]]:
    """All completions but the first, without log-probabilities: those are rounded."""
    return [each[:3] for each in output.completions[1:]]


def _distance(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Largest differences of elements, and what rounding is relative to; both ``(rows,)``.

    The latter is each row's largest element, since floating point has relative precision, and a
    row's elements were summed from terms of that size; but no less than 1.
    """
    ours, theirs = (each.double().reshape(each.shape[0], -1) for each in (ours, theirs))
    apart = (ours - theirs).abs()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, apart).nan_to_num(nan=torch.inf)
    scale = ours.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1)
    return apart.amax(dim=1), scale.clamp(min=1.0)


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next(
        (position for position, (left, right) in enumerate(pairs) if left != right),
        min(len(ours), len(theirs)),
    )


def _at(token_ids: tuple[int, ...], position: int) -> str:
    return str(token_ids[position]) if position < len(token_ids) else "not there"


def _near_tie(
    uncached: StageOutput,
    other: StageOutput,
    run: Run,
    position: int,
    sampling: SamplingParams | None,
    widest: float,
) -> NearTie | None:
    """The tie that explains why the tokens part, if the uncached run's own numbers show one.

    Only plain greedy choices can be explained: with penalties or draws, log-probabilities are not
    what the choice was made by.
    """
    if sampling is None or not _is_plain_greedy(sampling) or uncached.logprobs is None:
        return None
    if position >= min(len(uncached.token_ids), len(other.token_ids)):
        return None
    choices = uncached.token_ids[position], other.token_ids[position]
    top = dict(uncached.logprobs[position].top)
    if not all(token in top for token in choices):
        return None
    gap = abs(top[choices[0]] - top[choices[1]])
    if gap >= widest:
        return None
    return NearTie(uncached.request_id, uncached.stage, run, position, choices, gap)


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    neutral = SamplingParams()
    return sampling.is_greedy and all(
        getattr(sampling, name) == getattr(neutral, name) for name in _SWAYING
    )
