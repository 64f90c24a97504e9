"""Whether a stage's output with caching is its output without."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import SamplingParams
from omni.verify_report import Difference, Kind, NearTie, Run
from stages import StageOutput

__all__ = ["Comparison", "compare_outputs", "tensor_tolerance"]

# A cached run batches other rows together than an uncached one, so sums round differently: a few
# units in the last place of a type's 24, 11 or 8 significant bits, through a few dozen layers.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# How near the log-probabilities of two tokens must be for rounding to have decided between them.
_TIE_GAPS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(slots=True)
class Comparison:
    """What was found in one output.

    Attributes:
        differences: what is not equal.
        near_tie: where the tokens part for a reason that is none, or None.
        max_abs_diff: largest difference between tensor elements.
    """

    differences: list[Difference] = field(default_factory=list)
    near_tie: NearTie | None = None
    max_abs_diff: float = 0.0


def tensor_tolerance(dtype: torch.dtype) -> float:
    """How far elements may be apart where a row's largest element is 1 or less.

    1e-5 for float32, 1e-2 for float16, 5e-2 for bfloat16; 0 for integers. A row of larger
    elements may be apart in proportion, since floating point has relative precision.
    """
    return _TOLERANCES.get(dtype, 0.0)


def compare_outputs(
    uncached: StageOutput,
    cached: StageOutput,
    run: Run,
    *,
    sampling: SamplingParams | None,
    dtype: torch.dtype | None,
    atol: float | None = None,
) -> Comparison:
    """Compare a request's outputs of one stage.

    Args:
        uncached: what is right.
        cached: what is to equal it.
        run: which of the cached runs it is from.
        sampling: parameters it ran with; None for a stage that samples nothing.
        dtype: in which the stage computes.
        atol: replaces :func:`tensor_tolerance`.
    """
    found = Comparison()
    compare = _Comparer(uncached, cached, run, found, atol)
    rows = None
    position = _first_difference(uncached.token_ids, cached.token_ids)
    if position is not None:
        found.near_tie = _near_tie(uncached, cached, run, position, sampling, dtype)
        # Rows of the tokens before the tie had the same input in both runs.
        rows = uncached.num_prompt_tokens + position
    if found.near_tie is None:
        rows = None
        compare.tokens(position)
        compare.finish()
    compare.tensors(rows)
    return found


class _Comparer:
    """Compares one aspect after the other, and writes down what differs."""

    def __init__(
        self,
        uncached: StageOutput,
        cached: StageOutput,
        run: Run,
        found: Comparison,
        atol: float | None,
    ) -> None:
        self.uncached = uncached
        self.cached = cached
        self.run = run
        self.found = found
        self.atol = atol

    def tokens(self, position: int | None) -> None:
        """Generated ids, of all completions."""
        if position is not None:
            ours, theirs = self.uncached.token_ids, self.cached.token_ids
            self._differ(
                "tokens",
                f"generated token {position} is {_at(theirs, position)}, "
                f"without caching {_at(ours, position)}",
            )
        elif self.uncached.completions != self.cached.completions:
            self._differ("tokens", "further completions (n > 1) are not the same")
        elif self.uncached.text != self.cached.text:
            self._differ(
                "tokens", f"text is {self.cached.text!r}, without caching {self.uncached.text!r}"
            )

    def finish(self) -> None:
        """Why it ended, and on how long a prompt."""
        if self.uncached.finish_reason != self.cached.finish_reason:
            self._differ(
                "finish_reason",
                f"finish reason is {self.cached.finish_reason}, "
                f"without caching {self.uncached.finish_reason}",
            )

    def tensors(self, rows: int | None) -> None:
        """Names, shapes and elements; of the leading ``rows`` only if given."""
        for name in sorted(self.uncached.tensors.keys() ^ self.cached.tensors.keys()):
            where = "only" if name in self.cached.tensors else "not"
            self._differ("tensor", f"tensor {name!r} is there {where} with caching")
        for name in sorted(self.uncached.tensors.keys() & self.cached.tensors.keys()):
            ours, theirs = self.uncached.tensors[name], self.cached.tensors[name]
            if rows is None:
                self._tensor(name, ours, theirs)
            elif min(len(ours), len(theirs)) >= rows:
                self._tensor(name, ours[:rows], theirs[:rows])

    def _tensor(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            self._differ(
                "tensor",
                f"tensor {name!r} is {tuple(theirs.shape)} {theirs.dtype}, "
                f"without caching {tuple(ours.shape)} {ours.dtype}",
            )
            return
        if ours.numel() == 0:
            return
        atol = self.atol if self.atol is not None else tensor_tolerance(ours.dtype)
        apart, allowed = _distance(ours, theirs, atol)
        self.found.max_abs_diff = max(self.found.max_abs_diff, float(apart.max()))
        wrong = (apart > allowed).flatten(1).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            worst = int(apart.flatten(1).amax(dim=1).argmax())
            row = f"row {worst}" if ours.dim() > 1 else f"element {worst}"
            self._differ(
                "tensor",
                f"tensor {name!r} differs in {len(wrong)} of {len(ours)} rows, most in {row}: "
                f"by {float(apart[worst].max()):.3g}, allowed are "
                f"{float(allowed[worst].max()):.3g}",
            )

    def _differ(self, kind: Kind, message: str) -> None:
        self.found.differences.append(
            Difference(self.uncached.request_id, self.uncached.stage, self.run, kind, message)
        )


def _distance(ours: Tensor, theirs: Tensor, atol: float) -> tuple[Tensor, Tensor]:
    """How far apart each element is, and how far it may be; both ``(rows, elements)``."""
    ours, theirs = (_as_rows(tensor) for tensor in (ours, theirs))
    apart = (ours - theirs).abs()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, apart).nan_to_num(nan=torch.inf)
    scale = ours.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1, keepdim=True)
    return apart, (atol * scale.clamp(min=1.0)).expand_as(apart)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.double().reshape(tensor.shape[0], -1)


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
    cached: StageOutput,
    run: Run,
    position: int,
    sampling: SamplingParams | None,
    dtype: torch.dtype | None,
) -> NearTie | None:
    """The tie that explains why the tokens part, if the uncached run's own numbers show one.

    Only plain greedy choices can be explained: with penalties or draws, log-probabilities are not
    what the choice was made by.
    """
    if sampling is None or not _is_plain_greedy(sampling) or uncached.logprobs is None:
        return None
    if position >= min(len(uncached.token_ids), len(cached.token_ids)):
        return None
    choices = uncached.token_ids[position], cached.token_ids[position]
    top = dict(uncached.logprobs[position].top)
    if not all(token in top for token in choices):
        return None
    gap = abs(top[choices[0]] - top[choices[1]])
    if gap >= _TIE_GAPS.get(dtype or torch.float32, 0.0):
        return None
    return NearTie(uncached.request_id, uncached.stage, run, position, choices, gap)


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    neutral = SamplingParams()
    return sampling.is_greedy and all(
        getattr(sampling, name) == getattr(neutral, name)
        for name in (
            "min_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "suppress_token_ids",
            "n",
        )
    )
