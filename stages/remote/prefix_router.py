"""Which of several replicas gets a request: the one that most likely holds its prefix."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b

from engine import ChatPrompt, ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
from stages.worker.messages import Enter

__all__ = ["MOST_AHEAD", "PrefixRouter"]

MOST_AHEAD = 4
"""Requests that a replica may have more than the least loaded one, for the sake of its cache."""

_PIECE_BYTES = 64
_MOST_PIECES = 512
_MOST_KNOWN = 2**16


class PrefixRouter:
    """Remembers which replica has seen which beginnings of prompts. ::

        prompt    | piece | piece | piece | piece |        hash 1 covers piece 1, hash 2 pieces 1-2
        replica       0       0       1                    goes to 1, if 1 is not overloaded

    A choice never changes what comes out, only how much of it is computed again. The replica with
    the longest known prefix gets the request, unless it has more than :data:`MOST_AHEAD` requests
    more than the one that has the fewest, which then gets it. Nothing known: the one with the
    fewest, by turns among equals.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._turn = 0

    def choose(self, enter: Enter, loads: Mapping[int, int]) -> int:
        """Choose a replica, and remember it.

        Args:
            enter: the request.
            loads: how many requests each replica has that can be chosen; at least one.
        """
        if len(loads) == 1:
            return next(iter(loads))
        hashes = _prefix_hashes(enter)
        chosen = self._longest_known(hashes, _not_overloaded(loads))
        if chosen is None:
            self._turn += 1
            chosen = min(loads, key=lambda each: (loads[each], (each - self._turn) % len(loads)))
        for each in hashes:
            self._known[each] = chosen
            self._known.move_to_end(each)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """A replica has lost what it held."""
        gone = [each for each, holder in self._known.items() if holder == replica]
        for each in gone:
            del self._known[each]

    def _longest_known(self, hashes: list[bytes], replicas: Collection[int]) -> int | None:
        for each in reversed(hashes):
            holder = self._known.get(each)
            if holder is not None and holder in replicas:
                return holder
        return None


def _not_overloaded(loads: Mapping[int, int]) -> list[int]:
    fewest = min(loads.values())
    return [replica for replica, load in loads.items() if load <= fewest + MOST_AHEAD]


def _prefix_hashes(enter: Enter) -> list[bytes]:
    """A hash for every beginning of a prompt, shortest first; none of one that has no text."""
    content = _content(enter.prompt)
    # Requests with different salts share nothing.
    chain = blake2b((enter.cache_salt or "").encode(), digest_size=16)
    hashes = []
    for start in range(0, min(len(content), _PIECE_BYTES * _MOST_PIECES), _PIECE_BYTES):
        chain.update(content[start : start + _PIECE_BYTES])
        hashes.append(chain.digest())
    return hashes


def _content(prompt: object) -> bytes:
    match prompt:
        case str():
            return prompt.encode(errors="replace")
        case TextPrompt():
            return _content(prompt.prompt)
        case TokensPrompt():
            return array("q", prompt.prompt_token_ids).tobytes()
        case ChatPrompt():
            return json.dumps(prompt.messages, default=str).encode()
        case ExplicitEncoderDecoderPrompt():
            return _content(prompt.encoder_prompt)
        case _:
            return b""
