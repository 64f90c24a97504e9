"""How much ``omni serve`` would take on of a pipeline, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.resources.memory_plan import format_bytes
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.serving.settings import ServerLimits

__all__ = ["describe_serving"]


def _count(value: float) -> str:
    return f"{value:,}"


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _seconds(value: float) -> str:
    return f"{value:,g} s"


_TOLD: Mapping[str, tuple[str, Callable[[float], str], str]] = {
    "max_running_requests": (
        "requests that run at once",
        _count,
        "--max-running-requests; else as many as all stages together can run",
    ),
    "max_waiting_requests": (
        "requests that wait behind these",
        _count,
        "--max-waiting-requests; one more is answered with 429",
    ),
    "max_body_bytes": ("a request's body", _bytes, "--max-body-mib; a larger one gets 413"),
    "max_arriving_bytes": ("bodies that come at once", _bytes, "four times that; more get 429"),
    "body_timeout_s": ("a body that stands still", _seconds, "fixed; it then ends with 408"),
    "max_sessions": ("realtime sessions", _count, "--max-sessions; one more gets an error"),
    "max_prompts": ("prompts of one request", _count, "fixed"),
    "request_timeout_s": (
        "a request, with its waiting",
        _seconds,
        "--request-timeout; it then ends with 504",
    ),
    "stop_timeout_s": ("what runs when the server stops", _seconds, "--stop-timeout"),
    "max_url_bytes": ("a file that is fetched", _bytes, "fixed; only with --allow-url-hosts"),
    "url_timeout_s": ("fetching it", _seconds, "fixed"),
}
"""Each of the server's limits: what is bounded, how its value is written, and what sets it."""

_MEDIA: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "max_audio_s": ("a sound", _seconds),
    "max_image_pixels": ("pixels of an image", _count),
    "max_video_s": ("a video", _seconds),
    "max_video_pixels": ("pixels of a video's frames", _count),
    "max_file_bytes": ("a file", _bytes),
}
"""Each of a stage's limits of media: what is bounded, and how its value is written."""


def describe_serving(config: PipelineConfig) -> str:
    """Tell what a server takes on of this pipeline where no flag says otherwise.

    Media are bounded by the stages that read the user's prompt.
    """
    limits = ServerLimits()
    values = {name: getattr(limits, name) for name in _TOLD}
    values["max_running_requests"] = limits.running_requests(config.stages.values())
    rows = [(what, told(values[name]), how) for name, (what, told, how) in _TOLD.items()]
    for stage, settings in config.stages.items():
        media = getattr(getattr(settings, "engine", None), "media_limits", None)
        if settings.inputs is None and media is not None:
            place = f"stages.{stage}.engine.media_limits"
            rows += [
                (what, told(getattr(media, name)), f"{place}.{name}")
                for name, (what, told) in _MEDIA.items()
            ]
    whats, shown, _ = zip(*rows, strict=True)
    widths = max(map(len, whats)), max(map(len, shown))
    return "\n".join(
        [
            "At most, when it is served:",
            "",
            *(f"  {what:<{widths[0]}}  {value:>{widths[1]}}  {how}" for what, value, how in rows),
        ]
    )
