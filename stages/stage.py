"""What a stage is: requests in, outputs for the user and for the next stages out."""

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
"""What a stage can hand to the user."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """One request, as one stage gets it.

    Attributes:
        request_id: the same in every stage of the pipeline.
        sampling: replaces the stage's own sampling parameters; None keeps them.
        priority: lower runs earlier; equal priorities run first come, first served.
        cache_salt: only requests with the same salt share cached blocks.
        order: among requests of one priority, the smallest runs first; None puts it behind those
            that are there.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    order: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A request that a stage has prepared for its :meth:`Stage.add`, with what it made of it."""

    request: StageRequest
    content: Any = None


StageStats: TypeAlias = EngineStats
"""A stage counts what its engine counts."""


@dataclass(frozen=True, slots=True)
class TransformContext:
    """What a transform is given to make the next stage's prompt from.

    Attributes:
        prompt: the prompt that the user gave the pipeline.
        sources: the finished outputs of the stages named in ``inputs: from``, in that order.
            Their tensors are shared with other stages and the user: do not change them in place.
            What a source left on a GPU is there, where this process has it, or else on the CPU.
            On an edge with a ``chunk_size`` there is one source, and ``token_ids`` and ``tensors``
            hold only what is new since the chunk before.
        speaker: whose voice the user wants; None leaves it to the checkpoint.
        first_row: place in the source's sequence of the first row of ``tensors``; 0 unless this
            is a later chunk.
        is_last: whether the source is done; False if more chunks follow.
    """

    request_id: str
    prompt: Prompt
    sources: tuple[StageOutput, ...]
    speaker: str | None = None
    first_row: int = 0
    is_last: bool = True


Transform: TypeAlias = Callable[[TransformContext], Prompt]
"""Makes a stage's prompt from what earlier stages put out. It may raise ``ValueError`` to fail
the one request it was called for."""


class _NamedInFiles:
    """Any transform in Python; in a file, its name."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        name = core_schema.str_schema()
        in_python = core_schema.union_schema([name, core_schema.callable_schema()])
        return core_schema.json_or_python_schema(json_schema=name, python_schema=in_python)


def _located(value: str | Transform, info: ValidationInfo) -> str | Transform:
    locate: Callable[[str], str] | None = (info.context or {}).get("locate_transform")
    return locate(value) if locate is not None and isinstance(value, str) else value


def _as_tuple(value: Any) -> Any:
    """Accept ``text`` for ``[text]``, and nothing for an empty list."""
    match value:
        case None:
            return ()
        case str():
            return (value,)
        case list():
            return tuple(value)
    return value


OneOrMore = BeforeValidator(_as_tuple)
"""In a file, one name may stand for a list of one."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """An edge (or several) into a stage, in Python and in YAML.

    Attributes:
        sources: names of the stages whose outputs are needed; ``from`` in YAML.
        transform: a registered name, ``"package.module:function"``, ``"file.py:function"``, or the
            function itself. A validation's context may have a function ``locate_transform``, which
            turns a name into one that means the same from anywhere.
        chunk_size: tokens of the one source after which the next chunk is handed on, while the
            source goes on; None waits until it is done.
        max_pending_chunks: chunks of one request that may wait for this stage before the source
            pauses the request.

    Raises:
        ValueError: a source or the transform is of the wrong type.
    """

    sources: Annotated[tuple[str, ...], Field(alias="from", min_length=1), OneOrMore]
    transform: Annotated[str | Transform, _NamedInFiles, AfterValidator(_located)]
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
        """The transform as it was named, or its function's name."""
        transform = self.transform
        if not isinstance(transform, str):
            return transform.__qualname__
        file, _, function = transform.rpartition(":")
        # What matters of a file is its name: its folder is that of the pipeline's.
        return f"{Path(file).stem}:{function}" if file.endswith(".py") else transform


def check_methods(kind: type[Any]) -> None:
    """Check a class for what it must define; ``ValueError`` names the methods that it lacks."""
    missing = set(getattr(kind, "__abstractmethods__", ()))
    if issubclass(kind, Stage) and kind.has_cache:
        defined = {name for base in kind.__mro__ if base is not Stage for name in vars(base)}
        missing |= {"enable_prefix_caching", "reset_prefix_cache"} - defined
    if missing:
        raise ValueError(f"class {kind.__qualname__} must define {', '.join(sorted(missing))}")


class Stage(ABC):
    """One step of a pipeline. Stages know nothing of each other; the runtime connects them.

    A stage belongs to one pipeline, and is driven by one thread at a time: ``add_request``,
    ``abort`` and ``step`` are never called at once.

    Args:
        name: unique in the pipeline.
        inputs: the stages that feed this one; None makes it a root, which gets the user's prompt.
        outputs: names of the tensors it hands on; None hands on all that it makes.
        final_output: what the user gets of it: any of ``"text"``, ``"tensors"`` and ``"audio"``;
            empty for a stage that only feeds others.

    Attributes:
        final_output_kinds: which of these a kind of stage has to give.
        built_of: the configuration that has built it; None if none has.
        has_cache: whether a kind of stage keeps anything of a request for later ones. One that does
            defines ``enable_prefix_caching`` and ``reset_prefix_cache``; of others the former says
            nothing, and no input token is ever a hit.
        enable_prefix_caching: whether it reuses what it computed; may be set while it is idle.
        num_steps: steps in which it had work, where a kind of stage counts them; the pipeline sees
            by it whether anything moves.

    Raises:
        ValueError: an argument of the wrong type, or a final output that this kind of stage does
            not make.
    """

    final_output_kinds: ClassVar[tuple[str, ...]] = FINAL_OUTPUTS
    has_cache: bool = True
    enable_prefix_caching: bool = True
    built_of: Settings | None = None
    num_steps: int = 0
    num_transfers: int = 0
    transferred_bytes: int = 0

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Make a stage; ``ValueError``: its class lacks methods that a stage must have."""
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
        """Width of its ``hidden_states`` and of the embeddings it takes; None if it has none."""
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        """Element type that it computes in; None if it does not compute with tensors."""
        return None

    @property
    def sampling(self) -> SamplingParams | None:
        """The sampling parameters of requests that bring none; None if it samples nothing."""
        return None

    @property
    def seed(self) -> int | None:
        """What the seeds of requests that bring none are drawn from; None if it samples nothing."""
        return None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What tells the tokens of its text; None if it writes none, or is driven elsewhere."""
        return None

    def configuration(self) -> Settings:
        """What another process builds such a stage of: that of which it was built.

        A kind of stage that is built of arguments alone makes one of these.

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
        """The parameters of one request: an object as it is, fields laid over the stage's own.

        Raises:
            ValueError: a field is unknown or out of range.
        """
        if isinstance(override, SamplingParams):
            return override
        own = self.sampling or SamplingParams(max_tokens=0)
        return SamplingParams.model_validate(own.model_dump() | dict(override))

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse parameters that no request could run with here, before any stage has begun.

        Raises:
            ValueError: the stage's model cannot do what they ask for. One that is a
                :class:`~engine.interface.placed_error.PlacedError` names the field.
        """
        if self.sampling is None:
            raise ValueError("it generates no tokens, so it takes no sampling parameters")

    @abstractmethod
    def add_request(self, request: StageRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: this request cannot run here (too long, wrong width, unknown ids, ...);
                the stage is unchanged and goes on with its other requests.
        """

    def prepare(self, request: StageRequest) -> Prepared:
        """Do what takes long of :meth:`add_request`, in any thread, also while the stage steps.

        A kind of stage that prepares nothing leaves this and :meth:`add` as they are here.
        Errors are those of :meth:`add_request`.
        """
        return Prepared(request)

    def add(self, prepared: Prepared) -> None:
        """Queue a request that :meth:`prepare` has returned, in the thread that drives the stage.

        Errors are those of :meth:`add_request`.
        """
        self.add_request(prepared.request)

    @abstractmethod
    def step(self) -> list[StageOutput]:
        """Do one unit of work; return the outputs that moved, finished or not."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; an id the stage does not have is ignored."""

    @property
    def takes_chunks(self) -> bool:
        """Whether requests may come in chunks: a first one, and more by ``extend_request``."""
        return False

    @property
    def gives_chunks(self) -> bool:
        """Whether its outputs can be handed on while a request still runs.

        Its tensors then have one row per token, and it can be paused.
        """
        return False

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """Voices that requests may choose from; None if it does not speak."""
        return None

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Hand in the next chunk of a live request's prompt; ``is_last`` of it says if it ends.

        Raises:
            ValueError: this stage takes no chunks, or not this one; the request can only be
                aborted then.
        """
        raise ValueError("it takes its requests whole, not in chunks")

    def needs_input(self, request_id: str) -> bool:
        """Whether a live request cannot go on before its next chunk comes."""
        return False

    def partial_tensors(self, request_id: str, first_row: int) -> Mapping[str, Tensor]:
        """Rows of a live request's ``outputs`` from one on, as far as they are known.

        Args:
            first_row: place in its sequence.

        Returns:
            ``name -> (num_known - first_row, ...)`` on the CPU; the caller's own. Fewer rows or no
            names at all while the request does not have them, such as after it gave its
            blocks back. Not asked of a stage whose ``outputs`` are ``()``.
        """
        raise ValueError("it hands on its outputs whole, not in chunks")

    def pause_request(self, request_id: str) -> None:
        """Let a live request rest, with all it holds, until it is resumed. Idempotent."""
        raise ValueError("it cannot pause a request")

    def resume_request(self, request_id: str) -> None:  # noqa: B027 - without pauses, no work
        """Let a paused request go on; one that is not paused, or not there, is ignored."""

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether it has requests: running, waiting, paused, or in need of input."""

    def reset_prefix_cache(self) -> None:  # noqa: B027 - without a cache, no work
        """Forget everything that was cached. The stage must be idle."""

    def stats(self) -> StageStats:
        """Counters since the stage was built."""
        return StageStats(
            num_steps=self.num_steps,
            num_transfers=self.num_transfers,
            transferred_bytes=self.transferred_bytes,
        )

    def replica_stats(self) -> tuple[StageStats, ...]:
        """The same by replica; of a stage that is not run by several workers there is one."""
        return (self.stats(),)

    def note_transfer(self, num_bytes: int) -> None:
        """Count what another stage has handed to this one, with the bytes of its tensors."""
        self.num_transfers += 1
        self.transferred_bytes += num_bytes

    def describe(self) -> Mapping[str, Any]:
        """What the stage reserved and resolved, for people: model, dtype, device, bytes, blocks."""
        return {}

    def check_integrity(self) -> None:  # noqa: B027 - without blocks, nothing to conserve
        """Raise if blocks are not conserved; prints the equation that failed."""

    @property
    def is_broken(self) -> bool:
        """Whether it knows that it cannot go on; its pipeline then calls :meth:`rebuild`."""
        return False

    def rebuild(self) -> None:
        """Drop all that the stage holds, its requests too, and rebuild it as it was built first.

        The pipeline asks for it when a failure has left the stage in an unknown state.
        Settings that were changed since, such as :attr:`enable_prefix_caching`, are kept, and its
        counters go on. What it held is freed before anything new is built.

        Raises:
            NotImplementedError: such a stage cannot be rebuilt, as by default.
            Exception: whatever building it raises; it may be tried again.
        """
        raise NotImplementedError(f"a {type(self).__name__} has no method rebuild")

    def close(self) -> None:  # noqa: B027 - what Python frees by itself
        """Drop all requests; the stage is not to be used afterwards."""
