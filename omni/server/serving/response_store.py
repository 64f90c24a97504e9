"""Store of responses and spoken answers that later requests continue, in bounded memory."""

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

_MAX_BYTES = 64 * 2**20


class ResponseStore:
    """LRU store of responses with their messages and the messages before them, up to 64 MiB.

    A client finds only entries created with its own API key, and none after their ``expires_at``.
    ``kind`` is the name of an entry in errors.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, kind: str = "response") -> None:
        self._max_bytes = max_bytes
        self._kind = kind
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str | None, str], tuple[bytes, bytes]] = OrderedDict()

    def add(
        self, client: Client, response: dict[str, Any], messages: Sequence[dict[str, Any]]
    ) -> None:
        """Store a response."""
        entry = json.dumps(response).encode(), json.dumps(messages).encode()
        self._entries[client.tenant, response["id"]] = entry
        self._num_bytes += sum(map(len, entry))
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= sum(map(len, oldest))

    def find(self, client: Client, response_id: str, param: str | None = None) -> tuple[Any, Any]:
        """Return a response, and the messages up to its end.

        Raises:
            ApiError: there is none: with status 404, or 400 if ``param`` names a request's field.
        """
        key = (client.tenant, response_id)
        response, messages = map(json.loads, self._entries.get(key, ("{}", "[]")))
        if not response or response.get("expires_at", math.inf) < time.time():
            status = HTTPStatus.NOT_FOUND if param is None else HTTPStatus.BAD_REQUEST
            raise ApiError(
                status,
                f"no {self._kind} {response_id!r:.80} is kept; send what was said in it yourself",
                param=param,
                code=f"previous_{self._kind}_not_found" if param is not None else None,
            )
        self._entries.move_to_end(key)
        return response, messages

    def remove(self, client: Client, response_id: str) -> None:
        """Remove a response; raises the same errors as :meth:`find`."""
        self.find(client, response_id)
        self._num_bytes -= sum(map(len, self._entries.pop((client.tenant, response_id))))
