"""Keys for the rows of a prompt, by which the next stage knows them without reading them.

What a stage puts out for a block of its prompt is determined by what determines the block: its
hash, under a salt of the engine whose rows these are. So a stage that reads rows need not hash
them, and finds what it computed of them before, be it that the rows were computed again meanwhile
and differ in rounding::

    the stage's tokens   | block 0 | block 1 | 2 . . | reply ...
    row_keys               k0 k0 k0  k1 k1 k1  0 0     0            0: to be hashed by content

Only full blocks of the prompt have keys: what comes behind them is cut into other chunks from run
to run, and is not the same block's in a longer prompt.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from engine.requests.request import Request

_SALT_BYTES, _HASH_BYTES = 16, 32


class RowKeys:
    """Makes the keys of one engine.

    Args:
        salt: 16 bytes that other engines have only if they compute the same rows; None: made up.
    """

    def __init__(self, block_size: int, salt: bytes | None = None) -> None:
        self._block_size = block_size
        self._salt = os.urandom(_SALT_BYTES) if salt is None else salt

    def renew(self) -> None:
        """Let rows made from now on be others than those made so far."""
        self._salt = os.urandom(_SALT_BYTES)

    def of(self, request: Request, start: int, stop: int) -> Tensor:
        """``(stop - start, 6)`` int64 for tokens that are computed; 0 where there is no key."""
        request.extend_hashes(self._block_size)
        num_full = request.num_prompt_tokens // self._block_size
        hashes = b"".join(self._salt + each for each in request.block_hashes[:num_full])
        blocks = np.frombuffer(hashes, np.int64).reshape(-1, (_SALT_BYTES + _HASH_BYTES) // 8)
        keys = np.zeros((stop - start, blocks.shape[1]), np.int64)
        keyed = blocks.repeat(self._block_size, axis=0)[start:stop]
        keys[: len(keyed)] = keyed
        return torch.from_numpy(keys)
