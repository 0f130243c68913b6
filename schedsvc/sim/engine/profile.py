"""Cost profiles: what an engine costs and holds, from YAML files beside this module."""

from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from schedsvc.sim.engine.config import EngineConfig, Policy, Prefill
from schedsvc.sim.engine.cost import StepCost

Ns = Annotated[int, Field(ge=0, le=3_600_000_000_000)]
Size = Annotated[int, Field(ge=1, le=1 << 40)]
SEQUENCES_MAX = 1 << 16


class ProfileError(ValueError):
    """A profile is unknown or wrong; the message names the file and the field."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CostFields(_Model):
    """The section `cost` of a profile; see StepCost for what the figures mean."""

    step_ns: Ns
    prefill_ns: Ns
    prefill_token_ns: Ns
    decode_kv_token_ns: Ns
    decode_ns: list[list[Ns]] = Field(min_length=1)

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
    """The section `engine` of a profile: defaults of EngineConfig."""

    kv_tokens: Size
    block_size_tokens: Size
    sequences_max: Annotated[int, Field(ge=1, le=SEQUENCES_MAX)]
    step_tokens_max: Size
    context_tokens_max: Size
    policy: Policy = "fcfs"
    prefill: Prefill = "chunked"


class Profile(_Model):
    """One engine: its name, where its figures come from, what it costs and what it holds."""

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    cost: CostFields
    engine: EngineFields

    def config(
        self,
        *,
        kv_tokens: int | None = None,
        block_size_tokens: int | None = None,
        sequences_max: int | None = None,
        step_tokens_max: int | None = None,
        context_tokens_max: int | None = None,
        policy: Policy | None = None,
        prefill: Prefill | None = None,
    ) -> EngineConfig:
        """Make an engine's configuration, with what is given in place of the defaults.

        A capacity that is no multiple of the block size is rounded down to whole blocks. Raises
        ValueError naming the field.
        """
        engine = self.engine
        block = engine.block_size_tokens if block_size_tokens is None else block_size_tokens
        if block < 1:
            raise ValueError(f"block_size_tokens: must be an integer of at least 1, not {block}")
        return EngineConfig(
            blocks=(engine.kv_tokens if kv_tokens is None else kv_tokens) // block,
            block_size_tokens=block,
            sequences_max=engine.sequences_max if sequences_max is None else sequences_max,
            step_tokens_max=engine.step_tokens_max if step_tokens_max is None else step_tokens_max,
            context_tokens_max=(
                engine.context_tokens_max if context_tokens_max is None else context_tokens_max
            ),
            policy=policy or engine.policy,
            prefill=prefill or engine.prefill,
        )

    def step_cost(self, sequences_max: int) -> StepCost:
        """Tabulate the cost of a step of up to so many sequences. O(sequences_max)."""
        cost = self.cost
        return StepCost.build(
            step_ns=cost.step_ns,
            prefill_ns=cost.prefill_ns,
            prefill_token_ns=cost.prefill_token_ns,
            decode_kv_token_ns=cost.decode_kv_token_ns,
            decode_points=[(sequences, ns) for sequences, ns in cost.decode_ns],
            sequences_max=sequences_max,
        )


def profile_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    folder = resources.files(__package__) / "profiles"
    return sorted(f.name[: -len(".yaml")] for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_profile(name: str) -> Profile:
    """Load a profile by its name, or from a file where the name ends with .yaml.

    Raises ProfileError: unknown name (with the known ones), unreadable file, wrong field.
    """
    if name.endswith(".yaml"):
        try:
            return _parse(name, Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"profile {name}: cannot be read: {error}") from error
    known = profile_names()
    if name not in known:
        raise ProfileError(
            f"profile {name!r} is unknown; known are {', '.join(known)}, or give a .yaml file"
        )
    file = resources.files(__package__) / "profiles" / f"{name}.yaml"
    return _parse(f"{name}.yaml", file.read_text(encoding="utf-8"))


def _parse(file: str, text: str) -> Profile:
    try:
        return Profile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ProfileError(f"profile {file}: is not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ProfileError(f"profile {file}: {where}: {first['msg']}") from error
