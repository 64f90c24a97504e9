"""Options of the commands, with their help texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

import typer

from omni.commands.bench.flags import BenchFlags
from omni.commands.command import CommandOptions, argument, option

if TYPE_CHECKING:
    from engine import EncoderPrompt, Prompt
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.requests.request import OmniRequest


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Flags that define requests: one for each prompt, chat and encoder prompt.

    Options of a command inherit them; see :func:`~omni.commands.command.command`. The help
    texts describe the fields.
    """

    prompts: list[str] | None = option(
        "A prompt, used unchanged, including placeholders; may be given several times.",
        "--prompt",
        "-p",
        metavar="TEXT",
    )
    chats: list[str] | None = option(
        "A user's message, in the checkpoint's chat template, after each --image, --audio and "
        "--video; needs no placeholders. Each of several is a separate conversation.",
        "--chat",
        metavar="TEXT",
    )
    audio: list[Path] | None = option(
        "An audio file (WAV, FLAC, OGG, MP3) for every --chat, after its images, or for the next "
        "placeholder of every --prompt; without either, each is a separate request. May be given "
        "several times.",
        "--audio",
        metavar="FILE",
    )
    language: str | None = option(
        "The language of every --audio: en, fr, ...; the model detects it by default.",
        metavar="CODE",
    )
    encoder_prompts: list[str] | None = option(
        "Text for an encoder; may be given several times.", "--encoder-prompt", metavar="TEXT"
    )
    decoder_prompt: str | None = option(
        "Start of the decoder's text, for every --audio or --encoder-prompt.", metavar="TEXT"
    )
    images: list[Path] | None = option(
        "An image for every --chat, or for the next placeholder of every --prompt; may be given "
        "several times.",
        "--image",
        metavar="FILE",
    )
    videos: list[Path] | None = option(
        "A video (mp4, webm), with its sound if the model supports that, for every --chat, after "
        "its audio, or for the next placeholder of every --prompt; may be given several times.",
        "--video",
        metavar="FILE",
    )

    @property
    def given(self) -> bool:
        """True if any of the flags was given."""
        shown = (self.images, self.audio, self.videos)
        wanted = (self.prompts, self.chats, self.encoder_prompts, *shown)
        return any(wanted) or self.decoder_prompt is not None or self.language is not None

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of all flags: equal flags mean equal requests."""
        import hashlib
        import json

        given = {field.name: getattr(self, field.name) for field in fields(PromptFlags)}
        return hashlib.sha256(json.dumps(given, default=os.fspath).encode()).hexdigest()

    def check_files(self, taken: Mapping[str, Collection[str]]) -> None:
        """Check the first bytes of the files, and that every stage accepts their modality.

        Raises:
            ValueError: a stage does not accept such a file, or one is missing or of another kind.
        """
        given = {"audio": self.audio, "image": self.images, "video": self.videos}
        for modality, files in given.items():
            for stage, modalities in taken.items():
                if files and modality not in modalities:
                    raise ValueError(
                        f"--{modality}: stage {stage!r} takes no {modality}; its model reads "
                        f"{', '.join(modalities) or 'what other stages make'}"
                    )
            for file in files or ():
                _check_file(modality, file)

    def requests(self) -> list[OmniRequest]:
        """Return the requests, with generated ids.

        Raises:
            ValueError: both prompts and chats are given; or the decoder prompt, the language, or
                an image is given without a prompt to go with.
        """
        # Imported here so that help and argument errors do not wait for it.
        from engine import AudioPrompt, ExplicitEncoderDecoderPrompt
        from omni.requests.request import OmniRequest

        if self.chats and self.prompts:
            raise ValueError(
                "--chat and --prompt do not go together: one is put into the chat template, the "
                "other is taken as it stands"
            )
        shows = bool(self.chats or self.prompts)
        for flag, files in (("--image", self.images), ("--video", self.videos)):
            if files and not shows:
                raise ValueError(f"{flag} stands beside --chat or --prompt only")
        if self.language is not None and (shows or not self.audio):
            raise ValueError("--language stands beside --audio only, without --chat or --prompt")
        encoder: list[EncoderPrompt] = [
            AudioPrompt(file, language=self.language)
            for file in (() if shows else self.audio or ())
        ]
        encoder += self.encoder_prompts or ()
        if self.decoder_prompt is not None and (shows or not encoder):
            raise ValueError(
                "--decoder-prompt stands beside --audio or --encoder-prompt only, without --chat "
                "or --prompt"
            )
        prompts: list[Prompt] = [*self._shown()]
        prompts += [ExplicitEncoderDecoderPrompt(each, self.decoder_prompt) for each in encoder]
        return [
            OmniRequest(prompt, request_id=f"prompt-{number}")
            for number, prompt in enumerate(prompts, start=1)
        ]

    def _shown(self) -> Iterator[Prompt]:
        """Yield the prompts and chats, with the files that they show."""
        from engine import ChatPrompt, TextPrompt

        given = {
            "image": tuple(self.images or ()),
            "audio": tuple(self.audio or ()),
            "video": tuple(self.videos or ()),
        }
        shown = {modality: files for modality, files in given.items() if files}
        for text in self.prompts or ():
            yield TextPrompt(text, multi_modal_data=shown) if shown else text
        # The relative order of flags of different names is not known: this order is fixed.
        parts = [{"type": modality} for modality, files in shown.items() for _ in files]
        for text in self.chats or ():
            # Plain text if nothing is shown: not every template supports parts.
            content = [*parts, {"type": "text", "text": text}] if parts else text
            yield ChatPrompt(({"role": "user", "content": content},), multi_modal_data=shown)


def _check_file(modality: str, file: Path) -> None:
    """Check the first bytes of a file; the engine checks its duration and size."""
    from engine.media.image_file import check_image
    from engine.media.media_source import MediaSource
    from engine.media.sound_file import stated_duration
    from engine.media.video_file import check_video

    check = {"audio": stated_duration, "image": check_image, "video": check_video}[modality]
    check(MediaSource(file, f"--{modality}:", sys.maxsize))


def complete_config(incomplete: str) -> list[str]:
    """Complete names of shipped pipelines; the shell completes files by itself."""
    from omni.pipelines.config_file import shipped_configs

    return [name for name in shipped_configs() if name.startswith(incomplete)]


def _complete_runtime(incomplete: str) -> list[str]:
    from stages.placement import RuntimeKind  # imported here so that help does not wait for it

    return [kind for kind in get_args(RuntimeKind) if kind.startswith(incomplete)]


Config: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A pipeline's YAML file, or the name of a shipped one, such as two_step.",
        autocompletion=complete_config,
    ),
]
Input: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--input",
        "-i",
        metavar="FILE",
        help="A file of requests, one JSON object per line; - is standard input.",
    ),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PLACE=VALUE",
        help="Replace a value: stages.writer.engine.num_blocks=64. May be given several times.",
    ),
]
SpeakerName: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Voice of the answers, unless a request names one."),
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SamplingFlags:
    """Flags that change the sampling of every stage that samples; requests override them."""

    max_tokens: int | None = option(
        "Maximum tokens to generate, in every stage that samples, unless a request sets it.",
        metavar="N",
    )
    temperature: float | None = option(
        "Temperature of every stage that samples, unless a request sets it; 0 is greedy.",
        metavar="NUMBER",
    )

    def with_sampling(self, pipeline: PipelineConfig) -> PipelineConfig:
        """Return the pipeline with the flags applied to every stage that samples.

        Raises:
            ValueError: a value is wrong or conflicts with a stage's settings, or no stage samples.
        """
        from omni.requests.request_line import merged_sampling  # imported here: help need not wait

        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        changes = {field: value for field, value in given.items() if value is not None}
        if not changes:
            return pipeline
        flags = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in changes.items())
        stages = dict(pipeline.stages)
        sampled = {name: each for name, each in stages.items() if each.own_sampling is not None}
        if not sampled:
            raise ValueError(f"{flags}: no stage of the pipeline {pipeline.name!r} samples")
        for name, stage in sampled.items():
            if "sampling" not in type(stage).model_fields:
                raise ValueError(
                    f"{flags}: stage {name!r}, of kind {stage.kind!r}, has no 'sampling'"
                )
            try:
                changed = merged_sampling(stage.own_sampling, changes)
            except ValueError as error:
                raise ValueError(f"{flags}: stage {name!r}: {error}") from error
            stages[name] = stage.model_copy(update={"sampling": changed})
        return pipeline.model_copy(update={"stages": stages})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RuntimeFlags:
    """Flags that override where the stages run."""

    runtime: str | None = option(
        "Where the stages run: inline, in this process; processes, in separate processes; ray, in "
        "a Ray cluster.",
        metavar="KIND",
        autocompletion=_complete_runtime,
    )
    address: str | None = option(
        "Address of the Ray cluster to join; by default one on this machine, or a new one.",
        metavar="HOST:PORT",
    )

    @property
    def runtime_overrides(self) -> dict[str, str]:
        """The values that the flags set, by dotted key."""
        given = {"runtime.kind": self.runtime, "runtime.address": self.address}
        return {place: value for place, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions(PromptFlags, SamplingFlags, RuntimeFlags, CommandOptions):
    """Options of ``omni run``."""

    config: Config
    input_file: Input = None
    output_dir: Path | None = option(
        "Write outputs.jsonl, tensors and audio here; texts are printed as well.",
        "--output-dir",
        "-o",
        metavar="DIR",
    )
    resume: bool = option(
        "Resume an interrupted run in --output-dir, if there is one.",
        "--resume",
        default=False,
    )
    overwrite: bool = option(
        "Replace existing outputs in --output-dir.", "--overwrite", default=False
    )
    trace: Path | None = option(
        "Write a timeline of every request, for Perfetto (ui.perfetto.dev) or chrome://tracing.",
        metavar="FILE",
    )
    speaker: SpeakerName = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions(CommandOptions):
    """Options of ``omni convert``."""

    folder: Path = argument("With model.bin, config.json and tokenizer.json.", metavar="FOLDER")
    out: Path = argument("New folder for the checkpoint.", metavar="NEW")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DemoOptions(CommandOptions):
    """Options of ``omni demo``."""

    output_dir: Path = option(
        "Write the answers here, as WAV files.",
        "--output-dir",
        "-o",
        default=Path("answers"),
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ValidateOptions(RuntimeFlags, CommandOptions):
    """Options of ``omni validate``."""

    config: Config
    input_file: Input = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(RuntimeFlags, CommandOptions):
    """Options of ``omni explain``."""

    config: Config
    load: bool = option(
        "Load the models to show what each stage reserves; they must be local, or on a hub that "
        "can be reached.",
        "--load/--no-load",
        default=True,
    )
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(PromptFlags, SamplingFlags, RuntimeFlags, CommandOptions):
    """Options of ``omni verify``."""

    config: Config
    input_file: Input = None
    atol: float | None = option(
        "Allowed difference of tensor elements (relative in rows that exceed 1), instead of "
        "measuring rounding errors.",
        metavar="NUMBER",
    )
    exact: bool = option(
        "Compare bits, with no tolerance: for stages with engine: {deterministic: true}.",
        "--exact",
        default=False,
    )
    speaker: SpeakerName = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ListOptions(CommandOptions):
    """Options of ``omni list``."""

    what: Literal["pipelines", "models", "architectures", "transforms", "kinds"] | None = argument(
        "pipelines, models, architectures, transforms or kinds; all of them by default.",
        default=None,
        metavar="[WHAT]",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(BenchFlags, RuntimeFlags, CommandOptions):
    """Options of ``omni bench``."""

    config: str | None = argument(
        "A pipeline's YAML file, or the name of a shipped one, to run in this process.",
        default=None,
        metavar="[CONFIG]",
        autocompletion=complete_config,
    )
    input_file: Input = None
    goodput: str | None = option(
        "Count the requests that keep limits: seconds for first_token, between_tokens, "
        "per_token, first_audio, end_to_end; a factor for real_time_factor.",
        metavar="MEASURE=NUMBER,...",
    )
    json: Path | None = option("Write all results here as JSON.", "--json", "-o", metavar="FILE")
    plot: Path | None = option("Plot the results over the load.", metavar="FILE.svg")
    overrides: Overrides = None
