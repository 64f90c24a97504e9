"""Keys for the rows of a prompt, which identify them to the next stage without their content.

The outputs of a stage for a block of its prompt are determined by the hash of the block and the
engine, which is identified by a salt. So a stage that consumes rows need not hash them, and gets
prefix hits even if the rows were recomputed meanwhile and differ in rounding::

    the stage's tokens   | block 0 | block 1 | 2 . . | reply ...
    row_keys               k0 k0 k0  k1 k1 k1  0 0     0            0: to be hashed by content

Only full blocks of the prompt have keys: later tokens are split into different chunks from run to
run, and belong to another block in a longer prompt.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from engine.requests.request import Request

_SALT_BYTES, _HASH_BYTES = 16, 32


class RowKeys:
    """Row keys of one engine.

    Args:
        salt: 16 bytes, shared only by engines that compute the same rows; None: random.
    """

    def __init__(self, block_size: int, salt: bytes | None = None) -> None:
        self._block_size = block_size
        self._salt = os.urandom(_SALT_BYTES) if salt is None else salt

    def renew(self) -> None:
        """Change the salt, so that future rows get other keys than past ones."""
        self._salt = os.urandom(_SALT_BYTES)

    def of(self, request: Request, start: int, stop: int) -> Tensor:
        """Return ``(stop - start, 6)`` int64 keys of computed tokens; 0 if there is no key."""
        request.extend_hashes(self._block_size)
        num_full = request.num_prompt_tokens // self._block_size
        hashes = b"".join(self._salt + each for each in request.block_hashes[:num_full])
        blocks = np.frombuffer(hashes, np.int64).reshape(-1, (_SALT_BYTES + _HASH_BYTES) // 8)
        keys = np.zeros((stop - start, blocks.shape[1]), np.int64)
        keyed = blocks.repeat(self._block_size, axis=0)[start:stop]
        keys[: len(keyed)] = keyed
        return torch.from_numpy(keys)
