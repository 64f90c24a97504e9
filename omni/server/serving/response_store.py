"""Responses and spoken answers that later requests go on from, in bounded memory."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client

_MOST_BYTES = 64 * 2**20


class ResponseStore:
    """Responses and the messages before and in them, as long as they fit 64 MiB.

    The one that was not used for the longest goes first. A client finds those that were made with
    its own API key, and none after its time ``expires_at``.

    ``kind`` is what errors call an entry.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES, kind: str = "response") -> None:
        self._most_bytes = most_bytes
        self._kind = kind
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str | None, str], tuple[bytes, bytes]] = OrderedDict()

    def add(
        self, client: Client, response: dict[str, Any], messages: Sequence[dict[str, Any]]
    ) -> None:
        """Keep a response."""
        entry = json.dumps(response).encode(), json.dumps(messages).encode()
        self._kept[client.tenant, response["id"]] = entry
        self._num_bytes += sum(map(len, entry))
        while self._num_bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= sum(map(len, oldest))

    def find(self, client: Client, response_id: str, param: str | None = None) -> tuple[Any, Any]:
        """The response, and the messages up to its end.

        Raises:
            ApiError: with status 404, or 400 where it is a field of a request.
        """
        key = (client.tenant, response_id)
        response, messages = map(json.loads, self._kept.get(key, ("{}", "[]")))
        if not response or response.get("expires_at", math.inf) < time.time():
            status = HTTPStatus.NOT_FOUND if param is None else HTTPStatus.BAD_REQUEST
            raise ApiError(
                status,
                f"no {self._kind} {response_id!r:.80} is kept; send what was said in it yourself",
                param=param,
                code=f"previous_{self._kind}_not_found" if param is not None else None,
            )
        self._kept.move_to_end(key)
        return response, messages

    def remove(self, client: Client, response_id: str) -> None:
        """Forget a response; see :meth:`find` for what is raised."""
        self.find(client, response_id)
        self._num_bytes -= sum(map(len, self._kept.pop((client.tenant, response_id))))
