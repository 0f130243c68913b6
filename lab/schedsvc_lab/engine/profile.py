"""Reads cost profiles, what an engine costs and holds, from YAML files beside this module."""

from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict, Unpack

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from schedsvc_lab.engine.config import (
    EngineConfig,
    Eviction,
    Groups,
    Policy,
    Preemption,
    Prefill,
    Resume,
)
from schedsvc_lab.engine.cost import StepCost
from schedsvc_lab.engine.memory import MemoryProfile

Ns = Annotated[int, Field(ge=0, le=3_600_000_000_000)]
Size = Annotated[int, Field(ge=1, le=1 << 40)]
SizeOrZero = Annotated[int, Field(ge=0, le=1 << 40)]
SEQUENCES_MAX = 1 << 16


class ProfileError(ValueError):
    """A profile is unknown or wrong; the message names the file and the field."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CostFields(_Model):
    """Reads the section `cost` of a profile; StepCost explains the figures."""

    step_ns: Ns
    prefill_ns: Ns
    prefill_token_ns: Ns
    decode_kv_token_ns: Ns
    decode_ns: list[list[Ns]] = Field(min_length=1)
    swap_token_ns: Ns = 0
    copy_token_ns: Ns = 0
    adapter_load_ns: Ns = 0

    @field_validator("decode_ns")
    @classmethod
    def _points(cls, points: list[list[int]]) -> list[list[int]]:
        if any(len(point) != 2 for point in points):
            raise ValueError("each point must be [sequences, ns]")
        if points[0][0] != 0:
            raise ValueError("the first point must be at 0 sequences")
        pairs = pairwise(points)
        if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairs):
            raise ValueError("sequences must grow from point to point, and ns must not shrink")
        return points


class EngineFields(_Model):
    """Reads the section `engine` of a profile: defaults of EngineConfig.

    `kv_tokens` is missing if the capacity follows from the section `memory`.
    """

    kv_tokens: Size | None = None
    block_size_tokens: Size
    sequences_max: Annotated[int, Field(ge=1, le=SEQUENCES_MAX)]
    step_tokens_max: Size
    context_tokens_max: Size
    policy: Policy = "fcfs"
    prefill: Prefill = "chunked"
    groups: Groups = "fan-out"
    preemption: Preemption = "recompute"
    resume: Resume = "arrival"
    swap_tokens: SizeOrZero = 0
    delay_factor_ppm: SizeOrZero = 0
    prefix_cache: Eviction = "off"
    cache_tokens_max: SizeOrZero | None = None
    adapters_max: SizeOrZero = 0
    adapter_tokens: SizeOrZero = 0
    reserve_prompt: bool = False


class EngineOptions(TypedDict, total=False):
    """Replaces a profile's defaults; None stands for the default."""

    kv_tokens: int | None
    block_size_tokens: int | None
    sequences_max: int | None
    step_tokens_max: int | None
    context_tokens_max: int | None
    policy: Policy | None
    prefill: Prefill | None
    groups: Groups | None
    preemption: Preemption | None
    resume: Resume | None
    swap_tokens: int | None
    delay_factor_ppm: int | None
    prefix_cache: Eviction | None
    cache_tokens_max: int | None
    adapters_max: int | None
    adapter_tokens: int | None
    reserve_prompt: bool | None


class Profile(_Model):
    """Describes one engine: its name, the source of its figures, what it costs and holds."""

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    cost: CostFields
    engine: EngineFields
    memory: MemoryProfile | None = None

    @model_validator(mode="after")
    def _has_capacity(self) -> Self:
        if self.engine.kv_tokens is None and self.memory is None:
            raise ValueError("engine.kv_tokens is missing, and so is the section memory")
        return self

    @property
    def kv_tokens(self) -> int:
        """Return the KV tokens under the profile's own defaults. Raises ValueError: none."""
        return self._kv_tokens(self.engine.step_tokens_max, self.engine.adapters_max)

    def config(self, **options: Unpack[EngineOptions]) -> EngineConfig:
        """Make an engine's configuration; a given value replaces the default.

        Tokens that are no multiple of the block size are rounded down to whole blocks. Raises
        ValueError naming the field.
        """
        fields: dict[str, Any] = self.engine.model_dump()
        fields |= {name: value for name, value in options.items() if value is not None}
        kv_tokens = fields.pop("kv_tokens")
        block = fields["block_size_tokens"]
        if block < 1:
            raise ValueError(f"block_size_tokens: must be an integer of at least 1, not {block}")
        if kv_tokens is None:
            kv_tokens = self._kv_tokens(fields["step_tokens_max"], fields["adapters_max"])
        swap_tokens, cache_tokens_max = fields.pop("swap_tokens"), fields.pop("cache_tokens_max")
        return EngineConfig(
            blocks=kv_tokens // block,
            swap_blocks=swap_tokens // block,
            cache_blocks_max=None if cache_tokens_max is None else cache_tokens_max // block,
            **fields,
        )

    def _kv_tokens(self, step_tokens_max: int, adapters_max: int) -> int:
        if self.engine.kv_tokens is not None:
            return self.engine.kv_tokens
        if self.memory is None:
            raise ValueError("kv_tokens: is missing, and so is the section memory")
        return self.memory.kv_tokens(step_tokens_max, adapters_max)

    def step_cost(self, sequences_max: int) -> StepCost:
        """Tabulate the cost of a step of up to `sequences_max` sequences. O(sequences_max)."""
        cost = self.cost
        return StepCost.build(
            step_ns=cost.step_ns,
            prefill_ns=cost.prefill_ns,
            prefill_token_ns=cost.prefill_token_ns,
            decode_kv_token_ns=cost.decode_kv_token_ns,
            decode_points=[(sequences, ns) for sequences, ns in cost.decode_ns],
            sequences_max=sequences_max,
            swap_token_ns=cost.swap_token_ns,
            copy_token_ns=cost.copy_token_ns,
            adapter_load_ns=cost.adapter_load_ns,
        )


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package, sorted."""
    folder = resources.files(__package__) / "profiles"
    return sorted(f.name[: -len(".yaml")] for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_profile(name: str) -> Profile:
    """Load a profile by its name, or from a file if the name ends with .yaml.

    Raises ProfileError: unknown name (with the known ones), unreadable file, wrong field.
    """
    if name.endswith(".yaml"):
        try:
            return _parse(name, Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ProfileError(f"profile {name}: cannot be read: {why}") from error
    known = profile_names()
    if name not in known:
        raise ProfileError(
            f"profile {name!r} is unknown; known are {', '.join(known)}, or give a .yaml file"
        )
    file = resources.files(__package__) / "profiles" / f"{name}.yaml"
    return _parse(f"{name}.yaml", file.read_text(encoding="utf-8"))


def dump_profile(profile: Profile) -> str:
    """Write a profile as YAML that `load_profile()` reads; what is default is left out."""
    fields = profile.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(fields, sort_keys=False, width=100)


def _parse(file: str, text: str) -> Profile:
    try:
        return Profile.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"profile {file}: is not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ProfileError(f"profile {file}: {where}: {first['msg']}") from error
