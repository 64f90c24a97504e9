"""Stage interface: maps requests to outputs for the user and the next stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import core_schema

from engine import EngineStats, Prompt, SamplingParams
from engine.interface.arguments import check_argument, check_names
from engine.interface.ownership import Ownership
from engine.interface.settings import Settings
from stages.stage_output import StageOutput

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

FINAL_OUTPUTS = ("text", "tensors", "audio")
"""Kinds of outputs that a stage can return to the user."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A request to one stage.

    Attributes:
        request_id: the same in every stage of the pipeline.
        sampling: replaces the stage's own sampling parameters; None keeps them.
        priority: lower runs earlier; equal priorities run first come, first served.
        cache_salt: only requests with the same salt share cached blocks.
        order: among requests of one priority, the smallest runs first; None queues it after all
            existing ones.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    order: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A request that a stage has prepared for :meth:`Stage.add`, with the prepared content."""

    request: StageRequest
    content: Any = None


StageStats: TypeAlias = EngineStats
"""Stages have the same counters as engines."""


@dataclass(frozen=True, slots=True)
class TransformContext:
    """Input of a transform, which makes the next stage's prompt from it.

    Attributes:
        prompt: the user's prompt to the pipeline.
        sources: the finished outputs of the stages named in ``inputs: from``, in that order.
            Their tensors are shared with other stages and the user: do not change them in place.
            Tensors that a source left on a GPU are there if this process has it, else on the CPU.
            On an edge with a ``chunk_size`` there is one source, and ``token_ids`` and ``tensors``
            contain only the part since the previous chunk.
        speaker: voice that the user selected; None: the checkpoint's default.
        first_row: index in the source's sequence of the first row of ``tensors``; 0 unless this
            is a later chunk.
        is_last: True if the source is done; False if more chunks follow.
    """

    request_id: str
    prompt: Prompt
    sources: tuple[StageOutput, ...]
    speaker: str | None = None
    first_row: int = 0
    is_last: bool = True


Transform: TypeAlias = Callable[[TransformContext], Prompt]
"""Function that makes a stage's prompt from outputs of earlier stages. It may raise ``ValueError``
to fail the request that it was called for."""


class _TransformSchema:
    """Schema of a transform: any in Python, a name in a file."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        name = core_schema.str_schema()
        in_python = core_schema.union_schema([name, core_schema.callable_schema()])
        return core_schema.json_or_python_schema(json_schema=name, python_schema=in_python)


def located_by(key: str) -> AfterValidator:
    """Return a validator of names that a function of the validation's context, if any, resolves."""

    def resolve(value: Any, info: ValidationInfo) -> Any:
        locate: Callable[[str], str] | None = (info.context or {}).get(key)
        return locate(value) if locate is not None and isinstance(value, str) else value

    return AfterValidator(resolve)


def _as_tuple(value: Any) -> Any:
    """Accept ``text`` for ``[text]``, and None for an empty list."""
    match value:
        case None:
            return ()
        case str():
            return (value,)
        case list():
            return tuple(value)
    return value


OneOrMore = BeforeValidator(_as_tuple)
"""Validator that accepts a single name for a list of one."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """One or several edges into a stage, in Python and in YAML.

    Attributes:
        sources: names of the stages whose outputs are needed; ``from`` in YAML.
        transform: a registered name, ``"package.module:function"``, ``"file.py:function"``, or the
            function itself. A validation's context may have a function ``locate_transform``, which
            resolves a name to one that is independent of the folder.
        chunk_size: number of tokens of the (single) source after which a chunk is sent while the
            source still runs; None waits until it is done.
        max_pending_chunks: maximum number of chunks of one request that wait for this stage before
            the source pauses the request.

    Raises:
        ValueError: a source or the transform is of the wrong type.
    """

    sources: Annotated[tuple[str, ...], Field(alias="from", min_length=1), OneOrMore]
    transform: Annotated[str | Transform, _TransformSchema, located_by("locate_transform")]
    chunk_size: Annotated[int | None, Field(ge=1)] = None
    max_pending_chunks: Annotated[int, Field(ge=1)] = 2

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        given: object = self.sources
        if isinstance(given, str):
            wanted = "a tuple of stages' names"
            check_argument("sources", given, tuple, wanted, "StageInputs(({},), ...)")
        check_names("sources", given)
        object.__setattr__(self, "sources", tuple(self.sources))
        if not callable(self.transform):
            wanted = "a registered name, 'package.module:function' or a function"
            check_argument("transform", self.transform, str, wanted)

    @property
    def transform_name(self) -> str:
        """Name of the transform as given, or its function's name."""
        transform = self.transform
        if not isinstance(transform, str):
            return transform.__qualname__
        file, _, function = transform.rpartition(":")
        # The folder is omitted: it is that of the pipeline's file.
        return f"{Path(file).stem}:{function}" if file.endswith(".py") else transform


def check_methods(kind: type[Any]) -> None:
    """Check that a class defines all required methods; ``ValueError`` names the missing ones."""
    missing = set(getattr(kind, "__abstractmethods__", ()))
    if issubclass(kind, Stage) and kind.has_cache:
        defined = {name for base in kind.__mro__ if base is not Stage for name in vars(base)}
        missing |= {"enable_prefix_caching", "reset_prefix_cache"} - defined
    if missing:
        raise ValueError(f"class {kind.__qualname__} must define {', '.join(sorted(missing))}")


class Stage(ABC):
    """One step of a pipeline. Stages are independent of each other; the runtime connects them.

    A stage belongs to one pipeline, and is driven by one thread at a time: ``add_request``,
    ``abort`` and ``step`` are never called concurrently.

    Args:
        name: unique in the pipeline.
        inputs: the stages that feed this one; None makes it a root, which gets the user's prompt.
        outputs: names of the tensors to output; None: all that it computes.
        final_output: its outputs for the user: any of ``"text"``, ``"tensors"`` and ``"audio"``;
            empty for a stage that only feeds others.

    Attributes:
        final_output_kinds: the final outputs that this kind of stage supports.
        built_of: the configuration that it was built from, or None.
        has_cache: True if this kind of stage caches data of requests for later ones. It must then
            define ``enable_prefix_caching`` and ``reset_prefix_cache``; otherwise, the former has
            no meaning, and no input token is ever a hit.
        enable_prefix_caching: True if it reuses cached computations; may be set while it is idle.
        num_steps: number of steps with work, if this kind of stage counts them; the pipeline uses
            it to detect progress.

    Raises:
        ValueError: an argument of the wrong type, or a final output that this kind of stage does
            not support.
    """

    final_output_kinds: ClassVar[tuple[str, ...]] = FINAL_OUTPUTS
    has_cache: bool = True
    enable_prefix_caching: bool = True
    built_of: Settings | None = None
    num_steps: int = 0
    num_transfers: int = 0
    transferred_bytes: int = 0

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Create a stage; raise ``ValueError`` if its class lacks required methods."""
        check_methods(cls)
        return super().__new__(cls)

    def __init__(
        self,
        name: str,
        *,
        inputs: StageInputs | None = None,
        outputs: Collection[str] | None = None,
        final_output: Collection[str] = (),
    ) -> None:
        check_argument("name", name, str, "a str")
        if not name:
            raise ValueError("name must not be empty: it names the stage in its pipeline")
        fix = 'StageInputs(("source",), "text_as_prompt")'
        check_argument("inputs", inputs, StageInputs | None, "StageInputs or None", fix)
        check_names("outputs", outputs, or_none=True)
        check_names("final_output", final_output)
        unknown = sorted(set(final_output) - set(self.final_output_kinds))
        if unknown:
            raise ValueError(
                f"final_output cannot be {unknown}; what the stage makes is "
                f"{', '.join(self.final_output_kinds)}"
            )
        self.name = name
        self.ownership = Ownership(f"stage {name!r}")
        self.inputs = inputs
        self.outputs = None if outputs is None else tuple(outputs)
        self.final_output = tuple(final_output)

    @property
    def hidden_size(self) -> int | None:
        """Width of its ``hidden_states`` and input embeddings; None if it has none."""
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        """Element type of its computations; None if it does not compute with tensors."""
        return None

    @property
    def sampling(self) -> SamplingParams | None:
        """Default sampling parameters of requests; None if it samples nothing."""
        return None

    @property
    def seed(self) -> int | None:
        """Seed from which default seeds of requests are derived; None if it samples nothing."""
        return None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Tokenizer of its text; None if it generates none, or runs in another process."""
        return None

    def configuration(self) -> Settings:
        """Return the configuration from which another process can build this stage.

        Kinds of stages that are built from arguments override this to create one.

        Raises:
            ValueError: there is none.
        """
        if self.built_of is None:
            raise ValueError(
                f"a {type(self).__name__} that was made of arguments cannot be built in another "
                "process, which makes stages of their configurations: have its StageConfig build "
                "it, or override configuration()"
            )
        return self.built_of

    def merge_sampling(self, override: SamplingParams | Mapping[str, Any]) -> SamplingParams:
        """Merge a mapping of fields into the stage's parameters; return an object unchanged.

        Raises:
            ValueError: a field is unknown or out of range.
        """
        if isinstance(override, SamplingParams):
            return override
        own = self.sampling or SamplingParams(max_tokens=0)
        return SamplingParams.model_validate(own.model_dump() | dict(override))

    def check_sampling(self, params: SamplingParams) -> None:
        """Reject parameters that no request could run with here, before any stage has begun.

        Raises:
            ValueError: the stage's model does not support them. A
                :class:`~engine.interface.placed_error.PlacedError` names the field.
        """
        if self.sampling is None:
            raise ValueError("it generates no tokens, so it takes no sampling parameters")

    @abstractmethod
    def add_request(self, request: StageRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: this request cannot run here (too long, wrong width, unknown ids, ...);
                the stage is unchanged and continues with its other requests.
        """

    def prepare(self, request: StageRequest) -> Prepared:
        """Do the slow part of :meth:`add_request`, in any thread, even while the stage steps.

        Kinds of stages without preparation need not override this and :meth:`add`.
        Errors are those of :meth:`add_request`.
        """
        return Prepared(request)

    def add(self, prepared: Prepared) -> None:
        """Queue a request from :meth:`prepare`, in the thread that drives the stage.

        Errors are those of :meth:`add_request`.
        """
        self.add_request(prepared.request)

    @abstractmethod
    def step(self) -> list[StageOutput]:
        """Do one unit of work; return the outputs with progress, finished or not."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request and free its resources; an unknown id is ignored."""

    @property
    def takes_chunks(self) -> bool:
        """True if requests may arrive in chunks: a first one, and more by ``extend_request``."""
        return False

    @property
    def gives_chunks(self) -> bool:
        """True if its outputs can be sent on while a request still runs.

        Its tensors then have one row per token, and its requests can be paused.
        """
        return False

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """Voices that requests may choose from; None if it does not speak."""
        return None

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Append the next chunk of a live request's prompt; its ``is_last`` marks the end.

        Raises:
            ValueError: this stage does not accept chunks, or not this one; the request can then
                only be aborted.
        """
        raise ValueError("it takes its requests whole, not in chunks")

    def needs_input(self, request_id: str) -> bool:
        """Return True if a live request cannot continue before its next chunk."""
        return False

    def partial_tensors(self, request_id: str, first_row: int) -> Mapping[str, Tensor]:
        """Return the known rows of a live request's ``outputs`` from ``first_row`` on.

        Args:
            first_row: index in its sequence.

        Returns:
            ``name -> (num_known - first_row, ...)`` on the CPU, owned by the caller. Fewer rows or
            no names at all while the request does not have them, for example after it lost its
            blocks. Not called if ``outputs`` are ``()``.
        """
        raise ValueError("it hands on its outputs whole, not in chunks")

    def pause_request(self, request_id: str) -> None:
        """Pause a live request, which keeps its resources, until it is resumed. Idempotent."""
        raise ValueError("it cannot pause a request")

    def resume_request(self, request_id: str) -> None:  # noqa: B027 - without pauses, no work
        """Resume a paused request; one that is not paused, or unknown, is ignored."""

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """True if it has requests: running, waiting, paused, or in need of input."""

    def reset_prefix_cache(self) -> None:  # noqa: B027 - without a cache, no work
        """Drop all cached data. The stage must be idle."""

    def stats(self) -> StageStats:
        """Return counters since the stage was built."""
        return StageStats(
            num_steps=self.num_steps,
            num_transfers=self.num_transfers,
            transferred_bytes=self.transferred_bytes,
        )

    def replica_stats(self) -> tuple[StageStats, ...]:
        """Return the counters per replica; one unless several workers run the stage."""
        return (self.stats(),)

    def note_transfer(self, num_bytes: int) -> None:
        """Count a transfer from another stage to this one, with the bytes of its tensors."""
        self.num_transfers += 1
        self.transferred_bytes += num_bytes

    def describe(self) -> Mapping[str, Any]:
        """Describe reserved and resolved values for users: model, dtype, device, bytes, blocks."""
        return {}

    def check_integrity(self) -> None:  # noqa: B027 - without blocks, nothing to conserve
        """Raise if blocks are not conserved; the error has the equation that failed."""

    @property
    def is_broken(self) -> bool:
        """True if it cannot continue; its pipeline then calls :meth:`rebuild`."""
        return False

    def rebuild(self) -> None:
        """Drop the stage's requests and resources, and rebuild it from its configuration.

        The pipeline calls this when a failure has left the stage in an unknown state. Settings that
        were changed since, such as :attr:`enable_prefix_caching`, are kept, and counters continue.
        Old resources are freed before new ones are built.

        Raises:
            NotImplementedError: the stage does not support this (the default).
            Exception: any error of building it; the call may be repeated.
        """
        raise NotImplementedError(f"a {type(self).__name__} has no method rebuild")

    def close(self) -> None:  # noqa: B027 - Python frees everything by default
        """Drop all requests; the stage must not be used afterwards."""
