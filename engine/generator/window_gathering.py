"""Which windows a generator's next pass computes, and which wait for company."""

from __future__ import annotations

from collections.abc import Iterable

from engine.generator.generator_request import CodeWindow, GeneratorRequest, WindowSizes

__all__ = ["WindowGathering"]

_FIRST_PATIENCE, _PATIENCE = 2, 8


class WindowGathering:
    """Puts windows of one length together, from utterances that are not equally far.

    A pass over few codes costs hardly less than one over eight times as many (26 ms and 55 ms on
    two cores), while utterances that began one after the other come to their windows one after the
    other. So a window waits while codes keep coming and another utterance is on the way to a window
    as long. Each step, other stages' work is done in between and costs nothing more::

        codes of A  ────────┤ window         │ both in one pass
        codes of B  ──────────────┤ window   │
        codes of C  ────────────────┤        └ C is last of those on the way: none waits longer

    A step without new codes ends all waiting, so that nothing stands still: where codes come from
    another process, that is the next step at once. A wait ends after a few steps in any case: of
    an utterance's first window, which decides when it is first heard, after 2; of those behind it,
    for which there is sound to hear meanwhile, after 8.

    Args:
        sizes: how chunks are cut.
        max_batch_size: windows in a pass.
    """

    def __init__(self, sizes: WindowSizes, max_batch_size: int) -> None:
        self._sizes = sizes
        self._max_batch_size = max_batch_size

    def next_batch(
        self, requests: Iterable[GeneratorRequest], *, has_new_codes: bool
    ) -> list[tuple[GeneratorRequest, CodeWindow]]:
        """Choose windows of one length: those of the first in the order that need not wait.

        Args:
            requests: all that are live, in the order in which they should run. Those that wait
                have it noted.
            has_new_codes: whether any codes came since this was last asked.

        Returns:
            A window of each of several requests; none if nothing can run or all should wait.
        """
        ready: dict[int, list[tuple[GeneratorRequest, CodeWindow]]] = {}
        coming: set[int] = set()
        for request in requests:
            window = request.next_window(self._sizes)
            if window is not None:
                ready.setdefault(window.num_codes, []).append((request, window))
            elif not request.is_last:
                coming.add(request.coming_window(self._sizes).num_codes)
        chosen: list[tuple[GeneratorRequest, CodeWindow]] = []
        for num_codes, windows in ready.items():
            batch = windows[: self._max_batch_size]
            may_wait = has_new_codes and num_codes in coming
            if not may_wait or len(batch) == self._max_batch_size or _is_late(batch):
                chosen = batch
                break
        for windows in ready.values():
            for request, _ in windows:
                request.num_waits += 1
        for request, _ in chosen:
            request.num_waits = 0
        return chosen


def _is_late(batch: Iterable[tuple[GeneratorRequest, CodeWindow]]) -> bool:
    return any(
        request.num_waits >= (_PATIENCE if request.num_done else _FIRST_PATIENCE)
        for request, _ in batch
    )
