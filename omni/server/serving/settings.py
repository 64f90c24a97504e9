"""Limits and other settings of a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

if TYPE_CHECKING:
    from stages import StageConfig

_MIB = 2**20
_POSITIVE = {"gt": 0.0, "allow_inf_nan": False}


def _limit(what: str, how: str, **field: Any) -> Any:
    """Create a field; ``omni explain`` shows what it limits, and its option or consequence."""
    return Field(title=what, description=how, **field)


class ServerLimits(BaseModel):
    """Limits of a server; those about requests apply to each pipeline.

    ``max_body_bytes`` also limits the memory of one realtime session, and ``request_timeout_s``
    includes the time that a request waits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_running_requests: int | None = _limit(
        "requests that run at once",
        "--max-running-requests; else as many as all stages together can run",
        default=None,
        ge=1,
    )
    max_waiting_requests: int = _limit(
        "requests that wait behind these",
        "--max-waiting-requests; one more is answered with 429",
        default=64,
        ge=0,
    )
    max_body_bytes: int = _limit(
        "a request's body", "--max-body-mib; a larger one gets 413", default=64 * _MIB, ge=1024
    )
    body_timeout_s: float = _limit(
        "a body that stands still", "fixed; it then ends with 408", default=30.0, **_POSITIVE
    )
    max_sessions: int = _limit(
        "realtime sessions", "--max-sessions; one more gets an error", default=64, ge=0
    )
    max_prompts: int = _limit("prompts of one request", "fixed", default=2048, ge=1)
    request_timeout_s: float = _limit(
        "a request, with its waiting",
        "--request-timeout; it then ends with 504",
        default=600.0,
        **_POSITIVE,
    )
    stop_timeout_s: float = _limit(
        "what runs when the server stops",
        "--stop-timeout",
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
    )
    max_url_bytes: int = _limit(
        "a file that is fetched", "fixed; only with --allow-url-hosts", default=20 * _MIB, ge=1
    )
    url_timeout_s: float = _limit("fetching it", "fixed", default=10.0, **_POSITIVE)

    @property
    def max_arriving_bytes(self) -> int:
        """Maximum bytes of concurrently arriving bodies, excluding the first 64 KiB of each."""
        return 4 * self.max_body_bytes

    @property
    def max_arriving_s(self) -> float:
        """Maximum seconds for a body to arrive."""
        return max(self.request_timeout_s, self.body_timeout_s)

    def running_requests(self, stages: Iterable[StageConfig]) -> int:
        """Return how many requests run concurrently in a pipeline of these stages."""
        if self.max_running_requests is not None:
            return self.max_running_requests
        return sum(_max_concurrent(stage) for stage in stages)


class ServerSettings(BaseModel):
    """Startup settings of a server.

    Attributes:
        port: port to bind; 0 picks a free one.
        api_keys: accepted keys, of which a request must send one; if empty, all are admitted.
        allow_url_hosts: hosts from which files given by URL may be fetched.
        allow_origins: origins of other hosts whose web pages are allowed, such as
            ``https://example.org``.
        aliases: additional names of pipelines.
        transcriber: pipeline that transcribes realtime sessions that name no served pipeline.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[SecretStr, ...] = ()
    allow_url_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    aliases: dict[str, str] = Field(default_factory=dict)
    transcriber: str | None = None
    limits: ServerLimits = ServerLimits()

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            text = key.get_secret_value()
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError(
                    "an API key is sent in a header: it must be of printable ASCII characters, "
                    "without spaces, and not be empty"
                )
        return keys


def _max_concurrent(stage: StageConfig) -> int:
    """Return how many requests a stage's workers run per step; 1 each for kinds without a limit."""
    engine = getattr(stage, "engine", None)
    sizes = (getattr(engine, name, None) for name in ("max_num_seqs", "max_batch_size"))
    each = next((size for size in sizes if isinstance(size, int)), 1)
    return each * len(stage.placement.all_devices)
