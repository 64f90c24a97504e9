"""What all settings that a user makes in Python have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.interface.schema_error import explain_validation_error

__all__ = ["Settings"]


class Settings(BaseModel):
    """Settings by name, checked when they are made, and not to be changed afterwards.

    Raises:
        ValueError: one line for every mistake, which names the class, the field, what was expected
            and what came; for an unknown field the nearest one. Where a file's settings are
            checked, whoever reads the file tells the mistakes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def __init__(self, *values: Any, **fields: Any) -> None:
        cls = type(self)
        if values:
            required = [name for name, field in cls.model_fields.items() if field.is_required()]
            first = (*required, *cls.model_fields)[0]
            raise ValueError(
                f"{cls.__name__} takes its fields by name, such as {first}=..., got {values[0]!r}"
            )
        try:
            super().__init__(**fields)
        except ValidationError as error:
            told = explain_validation_error(error, cls, fields, source=cls.__name__)
        else:
            return
        raise ValueError(told)

    # Settings inside of others are not made by this constructor: the mistakes of all are told
    # together, with the whole place of each. Pydantic knows by this mark that it may do without.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError:
            pass
        else:
            return
        raise ValueError(
            f"{type(self).__name__}: {name} cannot be changed: make new ones, "
            f"model_copy(update={{{name!r}: ...}})"
        )
