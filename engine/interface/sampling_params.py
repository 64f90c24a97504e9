"""Sampling parameters: how one request's tokens are chosen and when it ends.

Also assigns seeds to requests without one, and validates biases of single tokens' logits.
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
    """A reproducible sequence of seeds, drawn in the order of requests, wherever a stage runs.

    Args:
        seed: the engine's seed; None draws different seeds in every run.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._generator: Any = None

    def draw(self) -> int:
        """Draw the next seed, below 2 ** 62."""
        import torch  # imported late: checking parameters does not need it

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
        """Set the next seed in a request's parameters, if they need one and have none.

        Args:
            params: the request's parameters; None for the stage's. Greedy ones also consume a seed.
            own: the stage's parameters; None for a stage that samples nothing.
        """
        given = params or own
        if own is None or given is None or given.seed is not None:
            return params
        seed = self.draw()
        return params if given.is_greedy else given.model_copy(update={"seed": seed})


_MAX_BIAS = 100
"""Maximum absolute bias, as in OpenAI's API."""

_ID_BOUND = 10**18
"""Greater than any token id; limits the digits in error messages."""

_DIGITS = re.compile("[0-9]{1,18}")
"""A token id as a text key, as in JSON."""


_MAX_BIASES = 16_384
"""Maximum token ids of a ``logit_bias``: reading ten times as many delays other requests."""


class TokenBias(Mapping[int, float]):
    """An immutable, hashable mapping of token ids to numbers, in order of the ids."""

    __slots__ = ("_by_id",)

    def __init__(self, by_id: Mapping[int, float]) -> None:
        self._by_id = {token_id: by_id[token_id] for token_id in sorted(by_id)}

    @classmethod
    def of(cls, value: object) -> TokenBias:
        """Validate a user's value; reports only the first of possibly a million mistakes."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise PlacedError(
                (), f"should be a mapping of token ids to numbers, got {shortened(value)}"
            )
        if len(value) > _MAX_BIASES:
            raise PlacedError((), f"at most {_MAX_BIASES} ids are taken, got {len(value)}")
        by_id: dict[int, float] = {}
        for key, number in value.items():
            token_id = _parse_token_id(key)
            if token_id in by_id:
                raise PlacedError((), f"has the token id {token_id} twice")
            by_id[token_id] = _check_number(token_id, number)
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
            "additionalProperties": {"type": "number", "minimum": -_MAX_BIAS, "maximum": _MAX_BIAS},
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


def _parse_token_id(key: Any) -> int:
    if isinstance(key, str):
        is_id = _DIGITS.fullmatch(key) is not None
    else:
        is_id = _is_number(Integral, key) and 0 <= key < _ID_BOUND
    if is_id:
        return int(key)
    raise PlacedError(
        (), f"should have token ids as keys, whole numbers of at least 0, got {shortened(key)}"
    )


def _check_number(token_id: int, value: Any) -> float:
    if _is_number(Real, value) and -_MAX_BIAS <= value <= _MAX_BIAS:  # false for NaN
        return float(value)
    raise PlacedError(
        (str(token_id),),
        f"should be a number from -{_MAX_BIAS} to {_MAX_BIAS}, got {shortened(value)}",
    )


def _is_number(number: type, value: object) -> bool:
    """Return True for a number of this abstract type, including NumPy's, but not for a bool."""
    kind = type(value)
    # The common case first, as checks of abstract classes are slow.
    return kind is int or (kind is not bool and isinstance(value, number))


# Reports only the first mistake: a list of a million would make a million messages.
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(fail_fast=True)]

# Accepts any mapping and converts it into an immutable one.
LogitBias = Annotated[
    Mapping[int, float], GetPydanticSchema(lambda _source, handler: handler(TokenBias))
]


_CHECKPOINT_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Keys of ``generation_config.json``, and the fields whose defaults they set."""

CHECKPOINT_FIELDS = tuple(_CHECKPOINT_KEYS.values())
"""Fields of ``SamplingParams`` that a checkpoint may have defaults for."""

_NOT_SUPPORTED = (
    *("num_beams", "penalty_alpha", "typical_p", "epsilon_cutoff", "eta_cutoff", "guidance_scale"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("sequence_bias", "exponential_decay_length_penalty", "forced_eos_token_id"),
)


class SamplingParams(Settings):
    """Parameters of token selection and termination for one request.

    The checkpoint's ``generation_config.json`` may have other defaults for ``temperature``,
    ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``max_tokens`` and ``min_tokens``; an
    engine uses them for fields that were not set, unless its ``generation_config`` is ``ignore``.

    Attributes:
        max_tokens: maximum number of generated tokens; 0 runs the prompt only (an embedding
            request). None generates until ``max_model_len``. In a recording of several windows
            each window has this limit.
        min_tokens: stop tokens, EOS and stop strings are ignored before this many tokens.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0, or -1 as in vLLM, keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: drop tokens less likely than this share of the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in
            the prompt or the output (CTRL, Keskar et al. 2019).
        presence_penalty: subtracted once from every token that was generated.
        frequency_penalty: subtracted per time that a token was generated.
        seed: makes this request's draws repeatable in any batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text.
        ignore_eos: continue past the checkpoint's end-of-sequence tokens.
        max_repeats: end the text, as at ``max_tokens``, if its last tokens, up to 20 of them, occur
            more than this many times in a row: a model in a loop. None: never.
        logprobs: report log-probabilities of this many likeliest tokens and of the chosen; or None.
        suppress_token_ids: token ids that are never chosen.
        logit_bias: numbers from -100 to 100 by token id, each added to its token's logit before any
            other processing. In files ids are in quotes: {"50256": -100}.
        structured_output: the form that constrains the text, such as JSON of a schema; or None.
        n: number of independent completions of the prompt.
        truncate_prompt_tokens: truncate a longer prompt to so many tokens, like vLLM: to its last
            ones, or its first ones if ``max_tokens`` is 0. Special tokens that the tokenizer adds
            are kept. -1 leaves room in ``max_model_len`` for ``max_tokens`` or, if that is not set,
            one token; None refuses a prompt that is too long.
    """

    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1)
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
    def _wrap_stop_string(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        # Strict validation, as of a configuration file, would refuse a list from a validator.
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _check_stop_strings(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every text at once")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})"
            )
        if self.structured_output is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise PlacedError(
                (name,), "does not go with structured_output, whose form says where the text ends"
            )
        return self

    @field_validator("max_tokens", "min_tokens", "top_k", "max_repeats", "logprobs", "n")
    @classmethod
    def _check_size(cls, value: int | None) -> int | None:
        if value is not None and value >= 2**63:
            raise ValueError("should be less than 2**63")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 would leave nothing of the prompt; -1 keeps as much as fits")
        return cls._check_size(value)

    @property
    def only_truncates(self) -> bool:
        """True for a request that generates nothing, with no other parameter set."""
        return self.model_copy(update={"truncate_prompt_tokens": None}) == SamplingParams(
            max_tokens=0
        )

    @model_serializer(mode="wrap")
    def _dump_set_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: x for name, x in handler(self).items() if name in self.model_fields_set}

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with these values for the fields that were not set."""
        missing = {name: x for name, x in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing) if missing else self

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature == 0.0


def checkpoint_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that a ``generation_config.json`` sets for ``SamplingParams``.

    Like vLLM, sampling is on unless the file has ``do_sample: false``.

    Raises:
        ValueError: a value is invalid.
    """
    stated = {
        field: generation[key]
        for key, field in _CHECKPOINT_KEYS.items()
        if generation.get(key) is not None
    }
    if generation.get("do_sample") is False:
        stated["temperature"] = 0.0
    SamplingParams(**stated)
    return stated


def unsupported_generation(generation: Mapping[str, Any]) -> list[str]:
    """Return the keys of a ``generation_config.json`` that request unsupported features."""
    found = {key: generation.get(key) for key in _NOT_SUPPORTED}
    return [key for key, x in found.items() if x is True or x not in (None, 0, 1)]
