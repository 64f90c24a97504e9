"""What a folder of outputs came from, so that a run is only ever resumed as what it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["RUN_RECORD", "RunRecord"]

RUN_RECORD = "run.json"
_MOST_DIFFERENCES = 3
"""So many are told, and how many more there are."""


class RunRecord(BaseModel):
    """The content of ``run.json``.

    Attributes:
        format: of this file.
        pipeline: every setting, with its default, and with flags laid over it; but not where the
            stages run, as long as nothing that comes out depends on it.
        requests: SHA-256, in hexadecimal, of the file of requests, or of the flags in its place.
        num_requests: how many they are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    pipeline: Mapping[str, Any]
    requests: str
    num_requests: int

    @classmethod
    def of(cls, pipeline: BaseModel, requests: str, num_requests: int) -> RunRecord:
        """Record a pipeline's configuration; folders of models as they are found from here."""
        settings = pipeline.model_dump(mode="json", by_alias=True)
        settings.pop("runtime", None)
        for stage in settings["stages"].values():
            # Other devices round differently; how many workers there are changes nothing.
            placement = stage.pop("placement", None) or {}
            device = placement.get("devices") or placement.get("device")
            if device is not None:
                stage["placement"] = {"device": device}
            if stage.get("model") and Path(stage["model"]).is_dir():
                stage["model"] = str(Path(stage["model"]).resolve())
        return cls(pipeline=settings, requests=requests, num_requests=num_requests)

    @classmethod
    def parse(cls, content: bytes) -> RunRecord:
        """Read the file.

        Raises:
            ValueError: this is not what the file holds.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            raise ValueError(f"{RUN_RECORD} is damaged, or of another version") from None

    def differences(self, other: RunRecord) -> str:
        """Say what is not the same as in another run, the earlier one; nothing if all is."""
        found = list(_differences(other.pipeline, self.pipeline, ""))
        if self.requests != other.requests:
            were, are = other.num_requests, self.num_requests
            found.insert(0, "the requests" + (f": {were} then, {are} now" if were != are else ""))
        more = len(found) - _MOST_DIFFERENCES
        return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _differences(then: Any, now: Any, place: str) -> Iterator[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*then, *now)):
            deeper = f"{place}.{key}" if place else str(key)
            yield from _differences(then.get(key), now.get(key), deeper)
    elif then != now:
        yield f"{place}: {then!r} then, {now!r} now"
