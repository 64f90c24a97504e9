"""The ``omni serve`` command: pipelines behind an HTTP server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from omni.commands.command import CommandOptions, argument, option
from omni.commands.options import RuntimeFlags

if TYPE_CHECKING:
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.server.serving.settings import ServerSettings

_KEY_VARIABLE = "OMNI_API_KEY"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(RuntimeFlags, CommandOptions):
    """Options of ``omni serve``; the help texts describe them."""

    configs: list[str] = argument(
        "YAML files of pipelines, or names of shipped ones; the name of each is its model id.",
        metavar="CONFIG...",
    )
    host: str = option(
        "Address to listen on; 0.0.0.0 for all networks.", default="127.0.0.1", metavar="NAME"
    )
    port: int = option("0 selects a free port.", default=8000, min=0, max=65535)
    api_keys: list[str] | None = option(
        "Require this key; may be given several times. Better set "
        f"${_KEY_VARIABLE}, with commas between several: others can see command lines.",
        "--api-key",
        metavar="KEY",
    )
    allow_origins: list[str] | None = option(
        "Allow requests from web pages of another host, such as https://example.org; may be given "
        "several times.",
        "--allow-origin",
        metavar="URL",
    )
    allow_url_hosts: list[str] | None = option(
        "Fetch images and videos from this host if requests name their URL; may be given several "
        "times.",
        "--allow-url-hosts",
        metavar="NAME",
    )
    aliases: list[str] | None = option(
        "Another name of a pipeline, such as gpt-4o=chat for clients that require one; may be "
        "given several times.",
        "--alias",
        metavar="NAME=PIPELINE",
    )
    transcriber: str | None = option(
        "The served pipeline that transcribes speech in realtime sessions; with it, users can "
        "speak to models that only read text.",
        metavar="NAME",
    )
    max_running_requests: int | None = option(
        "Limit per pipeline; by default as many as its stages together can run.", min=1
    )
    max_waiting_requests: int = option(
        "Limit per pipeline; further requests get status 429.", default=64, min=0
    )
    max_sessions: int = option("Maximum open realtime sessions.", default=64, min=0)
    max_body_mib: int = option("Maximum body of one request, in MiB.", default=64, min=1)
    request_timeout: float = option(
        "Timeout of one request, including waiting.", default=600.0, min=0.001, metavar="SECONDS"
    )
    stop_timeout: float = option(
        "Time for running requests to finish on stop.", default=30.0, min=0.0, metavar="SECONDS"
    )


def serve_pipelines(configs: Sequence[PipelineConfig], options: ServeOptions) -> None:
    """Serve until a signal arrives.

    Raises:
        ValueError: an option is wrong, the port is not available, a model cannot be loaded, or
            the extra ``serve`` is not installed.
    """
    try:
        from omni.server.http_server import HttpServer, bind, url_of
    except ImportError as error:
        raise ValueError(
            f"omni serve needs packages that are not installed ({error.name}): "
            "pip install -e '.[serve]' in a checkout of omni-pipeline"
        ) from error
    from omni.pipelines.pipeline_config import check_runtime
    from omni.server.serving.pipeline_server import PipelineServer

    for config in configs:
        check_runtime(config)
    settings = _settings(options)
    server = PipelineServer(configs, settings, apart=True)
    server.on_loaded = lambda: typer.echo("ready", err=True)
    listener = bind(settings)
    names = ", ".join(server.pipelines)
    # Programs need this line too: with --port 0 they do not know the port.
    place = f"serving {names} at {url_of(listener)}"
    HttpServer(server, listener, lambda: typer.echo(place, err=True)).run()
    if server.is_loading:
        # The loading thread cannot be stopped, and the interpreter crashes if it shuts down while
        # a thread loads libraries. No request has run yet, so nothing is lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _settings(options: ServeOptions) -> ServerSettings:
    from pydantic import SecretStr, ValidationError

    from engine.interface.settings import explain_validation_error
    from omni.server.serving.settings import ServerLimits, ServerSettings

    keys = options.api_keys or os.environ.get(_KEY_VARIABLE, "").split(",")
    given = {
        "host": options.host,
        "port": options.port,
        "api_keys": tuple(SecretStr(key.strip()) for key in keys if options.api_keys or key),
        "allow_url_hosts": tuple(options.allow_url_hosts or ()),
        "allow_origins": tuple(options.allow_origins or ()),
        "aliases": _aliases(options.aliases or ()),
        "transcriber": options.transcriber,
        "limits": ServerLimits(
            max_running_requests=options.max_running_requests,
            max_waiting_requests=options.max_waiting_requests,
            max_sessions=options.max_sessions,
            max_body_bytes=options.max_body_mib * 2**20,
            request_timeout_s=options.request_timeout,
            stop_timeout_s=options.stop_timeout,
        ),
    }
    try:
        return ServerSettings.model_validate(given)
    except ValidationError as error:
        raise ValueError(explain_validation_error(error, ServerSettings, given)) from None


def _aliases(given: Sequence[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for each in given:
        name, _, pipeline = each.partition("=")
        if not name or not pipeline:
            raise ValueError(f"--alias is NAME=PIPELINE, such as gpt-4o=chat, got {each!r}")
        if aliases.setdefault(name, pipeline) != pipeline:
            raise ValueError(f"--alias {name}: {aliases[name]} and {pipeline}; choose one")
    return aliases
