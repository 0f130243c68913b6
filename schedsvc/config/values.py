"""Reads the values of a file: the class of its mappings, and readers of numbers."""

from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from schedsvc.config.explain import type_name
from schedsvc.text.numerals import whole_number

__all__ = ["AUTO", "Section", "fixed_point", "tokens_or_auto"]

AUTO = -1  #: The core finds the number of tokens by itself.


class Section(BaseModel):
    """Reads a mapping of the file: no key but the known ones, no value of another type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_short_numbers(cls, data: Any) -> Any:
        """Read 100k as 100000 in keys of whole numbers. YAML reads it as text."""
        if not isinstance(data, dict):
            return data
        short = {
            key: number
            for key, value in data.items()
            if isinstance(value, str)
            and (number := whole_number(value)) is not None
            and key in _keys_of_numbers(cls)
        }
        return {**data, **short} if short else data


@cache
def _keys_of_numbers(section: type[Section]) -> frozenset[str]:
    """Return the keys of a section whose values are whole numbers. O(keys), once."""
    return frozenset(
        field.alias or name
        for name, field in section.model_fields.items()
        if _takes_number(field.annotation)
    )


def _takes_number(annotation: Any) -> bool:
    """Return whether a value may be a whole number: `int`, alone, with bounds, or beside None."""
    return annotation is int or any(map(_takes_number, get_args(annotation)))


def fixed_point(places: int, low: str, high: str) -> BeforeValidator:
    """Make a reader of numbers with at most `places` decimals into integer units of the last."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"has to be a number, not {type_name(value)}")
        try:
            number = Decimal(repr(value))
            units = number.scaleb(places)
            whole = units == units.to_integral_value()
        except InvalidOperation:
            raise ValueError("has to be a finite number") from None
        if not number.is_finite() or not Decimal(low) <= number <= Decimal(high):
            raise ValueError(f"is {value}; it has to lie between {low} and {high}")
        if not whole:
            raise ValueError(f"is {value}; it may have at most {places} decimals")
        return int(units)

    bounds = Field(ge=float(low), le=float(high))
    return BeforeValidator(read, json_schema_input_type=Annotated[float, bounds])


def tokens_or_auto(most: int, scale: int = 1) -> BeforeValidator:
    """Make a reader of `auto`, or of a number of tokens, which it multiplies by `scale`."""

    def read(value: object) -> int:
        if value == "auto":
            return AUTO
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ValueError(f"has to be auto, or a whole number up to {most}")
        return value * scale

    written = Literal["auto"] | Annotated[int, Field(ge=0, le=most)]
    return BeforeValidator(read, json_schema_input_type=written)
