"""Sampling parameters: how one request's tokens are chosen and when it ends.

Requests that bring no seed get one here, and biases of single tokens' logits are checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Annotated, Any

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from engine.interface.placed_error import PlacedError, shortened
from engine.interface.settings import Settings
from engine.interface.structured_output import StructuredOutput


class RequestSeeds:
    """One after another, in the order in which requests come: the same wherever a stage runs.

    Args:
        seed: an engine's own; None draws other ones every time.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._generator: Any = None

    def draw(self) -> int:
        """Draw the next one, below 2 ** 62."""
        import torch  # not where parameters are only checked

        if self._generator is None:
            self._generator = torch.Generator()
            if self._seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self._seed)
        return int(torch.randint(2**62, (), generator=self._generator))

    def seeded(
        self, params: SamplingParams | None, own: SamplingParams | None
    ) -> SamplingParams | None:
        """Give a request's parameters the next seed, if they need one and have none.

        Args:
            params: of the request; None: it takes the stage's own. Greedy ones use a seed up.
            own: of the stage; None of one that samples nothing.
        """
        given = params or own
        if own is None or given is None or given.seed is not None:
            return params
        seed = self.draw()
        return params if given.is_greedy else given.model_copy(update={"seed": seed})


_LARGEST = 100
"""To either side, as in OpenAI's API."""

_PAST_IDS = 10**18
"""Above all token ids: what has more digits is not worth reporting."""

_DIGITS = re.compile("[0-9]{1,18}")
"""A token id where keys are text, as in JSON."""


class TokenBias(Mapping[int, float]):
    """A mapping of token ids to numbers, hashable and not to be changed; in order of the ids."""

    __slots__ = ("_by_id",)

    def __init__(self, by_id: Mapping[int, float]) -> None:
        self._by_id = {token_id: by_id[token_id] for token_id in sorted(by_id)}

    @classmethod
    def of(cls, value: object) -> TokenBias:
        """Check what a user gave. The first mistake is reported: there may be a million of them."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise PlacedError(
                (), f"should be a mapping of token ids to numbers, got {shortened(value)}"
            )
        by_id: dict[int, float] = {}
        for key, number in value.items():
            token_id = _token_id(key)
            if token_id in by_id:
                raise PlacedError((), f"has the token id {token_id} twice")
            by_id[token_id] = _number(token_id, number)
        return cls(by_id)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(dict)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^{_DIGITS.pattern}$"},
            "additionalProperties": {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST},
        }

    def __getitem__(self, token_id: int) -> float:
        return self._by_id[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __hash__(self) -> int:
        return hash(tuple(self._by_id.items()))

    def __repr__(self) -> str:
        return repr(self._by_id)


def _token_id(key: Any) -> int:
    if isinstance(key, str):
        is_id = _DIGITS.fullmatch(key) is not None
    else:
        is_id = _is_a(Integral, key) and 0 <= key < _PAST_IDS
    if is_id:
        return int(key)
    raise PlacedError(
        (), f"should have token ids as keys, whole numbers of at least 0, got {shortened(key)}"
    )


def _number(token_id: int, value: Any) -> float:
    if _is_a(Real, value) and -_LARGEST <= value <= _LARGEST:  # not so a NaN
        return float(value)
    raise PlacedError(
        (str(token_id),),
        f"should be a number from -{_LARGEST} to {_LARGEST}, got {shortened(value)}",
    )


def _is_a(number: type, value: object) -> bool:
    """Whether it is of a kind of numbers, such as NumPy's; True and False are of none."""
    kind = type(value)
    # The first, as most are and abstract classes take their time.
    return kind is int or (kind is not bool and isinstance(value, number))


# The first wrong one is reported: a list of a million would make a million messages.
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(fail_fast=True)]

# Any mapping is taken, and becomes one that never changes.
LogitBias = Annotated[
    Mapping[int, float], GetPydanticSchema(lambda _source, handler: handler(TokenBias))
]


_OF_CHECKPOINTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Keys of ``generation_config.json``, and the fields that they are the defaults of."""

CHECKPOINT_FIELDS = tuple(_OF_CHECKPOINTS.values())
"""Fields of ``SamplingParams`` that a checkpoint may have defaults for."""

_NOT_SUPPORTED = (
    *("num_beams", "penalty_alpha", "typical_p", "epsilon_cutoff", "eta_cutoff", "guidance_scale"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("sequence_bias", "exponential_decay_length_penalty", "forced_eos_token_id"),
)


class SamplingParams(Settings):
    """How one request's tokens are chosen and when it ends.

    The checkpoint's ``generation_config.json`` may have other defaults for ``temperature``,
    ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``max_tokens`` and ``min_tokens``; an
    engine takes them for fields that were not set, unless its ``generation_config`` is ``ignore``.

    Attributes:
        max_tokens: tokens to generate at most; 0 runs the prompt only (an embedding request). None
            generates until ``max_model_len``. For a recording that takes several windows they are
            counted for each.
        min_tokens: no stop token, EOS or stop string counts before this many tokens.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: drop tokens less likely than this share of the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in
            the prompt or the output (CTRL, Keskar et al. 2019).
        presence_penalty: subtracted once from every token that was generated.
        frequency_penalty: subtracted per time that a token was generated.
        seed: makes this request's draws repeatable whatever it is batched with.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text.
        ignore_eos: go on past the checkpoint's end-of-sequence tokens.
        max_repeats: end the text, as if it had come to ``max_tokens``, where its last tokens, up to
            20 of them, stand there more often than this in a row: a model in a loop. None: never.
        logprobs: report so many likeliest tokens' log-probabilities and the chosen one's; or None.
        suppress_token_ids: never choose these.
        logit_bias: numbers from -100 to 100 by token id, each added to its token's logit before
            anything else is done to it. In files ids are in quotes: {"50256": -100}.
        structured_output: the form that the text is held to, such as JSON of a schema; or None.
        n: independent completions of the same prompt.
        truncate_prompt_tokens: cut a longer prompt to so many tokens, as vLLM does: its last ones,
            or its first ones where ``max_tokens`` is 0. Special tokens that the tokenizer adds are
            kept. -1 keeps what ``max_model_len`` leaves beside ``max_tokens`` or, where that is not
            set, one token; None refuses a prompt that is too long.
    """

    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    max_repeats: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0)
    suppress_token_ids: TokenIds = ()
    logit_bias: LogitBias = TokenBias({})
    structured_output: StructuredOutput | None = None
    n: int = Field(default=1, ge=1)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string_is_a_list_of_one(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        # Strict validation, as of a configuration file, would refuse the list behind a validator.
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every text at once")
        return value

    @model_validator(mode="after")
    def _go_together(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})"
            )
        if self.structured_output is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(
                f"{name} does not go with structured_output, whose form says where the text ends"
            )
        return self

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_kept(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 would leave nothing of the prompt; -1 keeps as much as fits")
        return value

    @property
    def only_truncates(self) -> bool:
        """Whether they are for a request that generates nothing: no other parameter is set."""
        return self.model_copy(update={"truncate_prompt_tokens": None}) == SamplingParams(
            max_tokens=0
        )

    @model_serializer(mode="wrap")
    def _only_what_was_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: x for name, x in handler(self).items() if name in self.model_fields_set}

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The same, with these values for the fields that were not set."""
        missing = {name: x for name, x in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing) if missing else self

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


def checkpoint_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a ``generation_config.json`` has defaults for.

    Like vLLM, it draws tokens where the file does not say ``do_sample: false``.

    Raises:
        ValueError: a value cannot be.
    """
    stated = {
        field: generation[key]
        for key, field in _OF_CHECKPOINTS.items()
        if generation.get(key) is not None
    }
    if generation.get("do_sample") is False:
        stated["temperature"] = 0.0
    SamplingParams(**stated)
    return stated


def unsupported_generation(generation: Mapping[str, Any]) -> list[str]:
    """Keys of a ``generation_config.json`` that ask for what is not supported."""
    found = {key: generation.get(key) for key in _NOT_SUPPORTED}
    return [key for key, x in found.items() if x is True or x not in (None, 0, 1)]
