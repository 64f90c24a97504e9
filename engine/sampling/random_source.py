"""Random numbers that depend on a request's seed and a position, and on nothing else."""

from __future__ import annotations

import hashlib

__all__ = ["uniform"]

_BITS = 53  # what a float64 holds


def uniform(seed: int, position: int) -> float:
    """The number that draws one token.

    There is no stream to keep: a request that was preempted and computed again, or that runs
    beside other requests, meets the same number at the same position. Neighbouring seeds and
    positions are as independent as BLAKE2b can make them.

    Args:
        seed: of the request, ``0 <= seed < 2**63``.
        position: how many tokens the request has generated before.

    Returns:
        A multiple of ``2**-53`` in ``(0, 1]``. Never 0: a token of probability 0 is never drawn.
    """
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> (64 - _BITS)) + 1) * 2.0**-_BITS
