"""Declares the outputs beside the answers: metrics, log, the state file, the usage ledger."""

from datetime import UTC, tzinfo
from decimal import Decimal
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, BeforeValidator, Field

from schedsvc.config.explain import type_name
from schedsvc.config.network import Address, FilePath, Name
from schedsvc.config.values import Section

__all__ = ["Budget", "Log", "Metrics", "Price", "State", "Usage", "time_zone"]


#: As browsers send it: in small letters.
HostName = Annotated[str, Field(pattern=r"^[a-z0-9_-][a-z0-9._-]{0,252}$")]


class Metrics(Section):
    """Describes the Prometheus page."""

    listen: Address
    #: Names of this host by which clients may ask; by addresses they always may.
    hosts: Annotated[list[HostName], Field(max_length=64)] = []
    tenants_max: Annotated[int, Field(ge=0, le=100_000)] = 1_000
    histogram_tenants_max: Annotated[int, Field(ge=0, le=1_000)] = 50
    #: Shows some histograms under the names of OpenTelemetry's conventions too.
    gen_ai: bool = False


class State(Section):
    """Names the file that outlives the process."""

    file: FilePath
    every_ms: Annotated[int, Field(ge=10, le=60_000)] = 1_000


class Log(Section):
    """Says how the process logs, always to stderr."""

    format: Literal["json", "console"] = "json"
    level: Literal["debug", "info", "warning", "error"] = "info"


def _amount(value: object) -> Decimal:
    """Read an amount of money as it is written, without binary rounding."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"has to be a number, not {type_name(value)}")
    amount = Decimal(repr(value))
    if not amount.is_finite() or not 0 <= amount <= 1_000_000:
        raise ValueError(f"is {value}; it has to lie between 0 and 1000000")
    return amount


Amount = Annotated[
    Decimal,
    BeforeValidator(_amount, json_schema_input_type=Annotated[float, Field(ge=0, le=1_000_000)]),
]


class Price(Section):
    """States the price of a million tokens, of a model and class, or (absent) of any."""

    model: Name | None = None
    request_class: Annotated[Name | None, Field(alias="class")] = None
    input_tokens: Annotated[Amount, Field(alias="input")]
    cached_tokens: Annotated[Amount | None, Field(alias="cached")] = None
    output_tokens: Annotated[Amount, Field(alias="output")]


def time_zone(name: str) -> tzinfo:
    """Return a time zone by its name. UTC needs no data. Raises ValueError, OSError or KeyError."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _zone(value: str) -> str:
    try:
        time_zone(value)
    except (ValueError, OSError, KeyError):
        if not available_timezones():
            raise ValueError(
                f"{value!r} cannot be looked up: this machine has no time zones; install the"
                " package tzdata (pip install tzdata)"
            ) from None
        raise ValueError(f"{value!r} is no time zone; write a name such as Europe/Paris") from None
    return value


#: The core's own bound.
BudgetTokens = Annotated[int, Field(ge=2, le=1_000_000_000_000)]


class Budget(Section):
    """Limits tokens of a calendar day and month in a time zone."""

    tokens_per_day: BudgetTokens | None = None
    tokens_per_month: BudgetTokens | None = None
    timezone: Annotated[str, AfterValidator(_zone)] = "UTC"

    def core_limits(self) -> dict[str, int]:
        """Return keyword arguments for the core; 0 is no limit."""
        return {"day_tokens": self.tokens_per_day or 0, "month_tokens": self.tokens_per_month or 0}


class Usage(Section):
    """Names the usage ledger, and the prices of its exports."""

    path: FilePath
    keep_days: Annotated[int, Field(ge=1, le=3_660)] = 400
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    prices: Annotated[list[Price], Field(max_length=1_000)] = []
