"""Reads profiles of tenants: what each asks for, from a YAML file or from options."""

from collections.abc import Iterator, Mapping
from heapq import merge
from pathlib import Path
from typing import Annotated, Literal
from zlib import crc32

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from schedsvc_lab.workload.arrivals import Arrivals
from schedsvc_lab.workload.lengths import Lengths
from schedsvc_lab.workload.make import Synthesis, synthesize
from schedsvc_lab.workload.record import Record

TENANTS_MAX = 1_000_000
CV_MAX = 10
INPUT, OUTPUT = "lognormal:500:1.0:8192", "lognormal:150:1.0:2048"

Kind = Literal["constant", "poisson", "gamma", "on-off", "ramp"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
_KINDS_OF = {
    "cv": ("gamma", "on-off", "ramp"),
    "on_s": ("on-off",),
    "off_s": ("on-off",),
    "end_rate": ("ramp",),
}


class ProfileError(ValueError):
    """A profile is wrong; the message names the file and the field."""


class Profile(BaseModel):
    """Describes one kind of tenant; `rate` (requests per second) is that of all `tenants` of it.

    Lengths are texts as `Lengths.parse` takes them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    rate: Positive
    arrivals: Kind = "poisson"
    cv: Annotated[float, Field(ge=0, le=CV_MAX)] | None = None
    on_s: Positive | None = None
    off_s: Positive | None = None
    end_rate: Positive | None = None
    tenants: Annotated[int, Field(ge=1, le=TENANTS_MAX)] = 1
    zipf: Annotated[float, Field(ge=0, le=20)] = 1.0
    input: str = INPUT
    output: str = OUTPUT
    request_class: Name | None = None
    adapter: Name | None = None
    deadline_ms: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None

    @field_validator("input", "output")
    @classmethod
    def _known_lengths(cls, text: str) -> str:
        Lengths.parse(text)
        return text

    @model_validator(mode="after")
    def _fits(self) -> "Profile":
        for name, kinds in _KINDS_OF.items():
            if getattr(self, name) is not None and self.arrivals not in kinds:
                raise ValueError(f"{name} is for arrivals of kind {', '.join(kinds)}")
        if self.arrivals == "ramp" and self.end_rate is None:
            raise ValueError("arrivals of kind ramp need end_rate")
        return self

    def arriving(self, duration_s: float | None) -> Arrivals:
        """Return the arrivals; a ramp takes the duration. Raises ValueError if it is None."""
        cv = 0.0 if self.arrivals == "constant" else 1.0 if self.cv is None else self.cv
        if self.arrivals == "on-off":
            return Arrivals(
                rate_per_s=self.rate,
                cv=cv,
                shape="on-off",
                on_s=self.on_s or 60.0,
                off_s=self.off_s or 60.0,
            )
        if self.arrivals == "ramp":
            if duration_s is None or self.end_rate is None:
                raise ValueError("arrivals of kind ramp need a duration")
            return Arrivals(
                rate_per_s=self.rate,
                cv=cv,
                shape="ramp",
                end_rate_per_s=self.end_rate,
                ramp_s=duration_s,
            )
        return Arrivals(rate_per_s=self.rate, cv=cv)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    profiles: Annotated[dict[Name, Profile], Field(min_length=1)]


def complaints(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield the field (dotted) and the reason of everything that is wrong."""
    for one in error.errors(include_url=False):
        field = ".".join(str(part) for part in one["loc"])
        yield field, one["msg"].removeprefix("Value error, ")


def read_profiles(path: Path) -> Mapping[str, Profile]:
    """Read profiles by name. Raises ProfileError and OSError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _File.model_validate(data).profiles
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not YAML: {error}") from None
    except ValidationError as error:
        found = "; ".join(f"{field or 'file'}: {reason}" for field, reason in complaints(error))
        raise ProfileError(f"{path}: {found}") from None


def synthesize_profiles(
    profiles: Mapping[str, Profile], duration_s: float, seed: int
) -> Iterator[Record]:
    """Yield the requests of all profiles by arrival.

    The random streams depend on the profile's name: another profile changes nothing in this one.
    Raises the errors of `synthesize`.
    """
    return merge(
        *(
            synthesize(
                Synthesis(
                    arrivals=profile.arriving(duration_s),
                    inputs=Lengths.parse(profile.input),
                    outputs=Lengths.parse(profile.output),
                    tenants=profile.tenants,
                    zipf_exponent=profile.zipf,
                    duration_s=duration_s,
                    seed=seed,
                    stream=(crc32(name.encode()),),
                    name=name,
                    request_class=profile.request_class,
                    adapter=profile.adapter,
                    deadline_ms=profile.deadline_ms,
                )
            )
            for name, profile in profiles.items()
        ),
        key=_arrival,
    )


def _arrival(record: Record) -> float:
    assert record.arrival_s is not None
    return record.arrival_s
