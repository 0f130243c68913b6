"""Overrides settings by name: one field of the engine, or one key of the scheduler's.

`engine.FIELD` and `cost.FIELD` are fields of the profile's sections, `scheduler.KEY` is a key of
the configuration's section `scheduler`. `tenants.NAME.KEY` and `groups.NAME.KEY` are keys of one
tenant or group, such as `tenants.a.quota.tokens_per_minute`; `weight.TENANT` is short for
`tenants.TENANT.weight`. A dot leads into a section. A run gets its policy separately, so
`scheduler.policy` is no setting.
"""

from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from schedsvc.config import Config
from schedsvc.config.models import Scheduler
from schedsvc_lab.engine import Profile
from schedsvc_lab.engine.profile import CostFields, EngineFields
from schedsvc_lab.sim.named_entries import ENTRY_SECTIONS, EntryError, changed_entry

M = TypeVar("M", bound=BaseModel)

# Sections of a profile.
_PARTS: dict[str, type[BaseModel]] = {"engine": EngineFields, "cost": CostFields}

_POLICY = "policy"

# The engine's sizes that the pools of a configuration give, too.
_POOL_FIELDS = {
    "kv_tokens": "capacity_tokens",
    "block_size_tokens": "block_size_tokens",
    "sequences_max": "max_running",
    "context_tokens_max": "max_model_tokens",
}


class OverrideError(ValueError):
    """A setting is unknown, or its value is wrong; the message names it."""


def parse(text: str) -> tuple[str, Any]:
    """Split NAME=VALUE; the value is read as in YAML. Raises OverrideError."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise OverrideError(f"{text!r}: give NAME=VALUE, such as engine.block_size_tokens=32")
    return name.strip(), value_of(name, value)


def value_of(name: str, text: str) -> Any:
    """Read one value as in YAML. Raises OverrideError."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise OverrideError(f"{name}: {text!r} is no value") from None


def known() -> list[str]:
    """Return the names of all settings, in order; of tenants and groups only the form."""
    profile = [f"{part}.{name}" for part, kind in _PARTS.items() for name in kind.model_fields]
    entries = [f"{section}.NAME.KEY" for section in ENTRY_SECTIONS]
    return [
        *profile,
        *(f"scheduler.{name}" for name in _aliases(Scheduler) if name != _POLICY),
        *entries,
        "weight.TENANT",
    ]


def override(profile: Profile, config: Config, settings: dict[str, Any]) -> tuple[Profile, Config]:
    """Return profile and configuration with some settings changed. Raises OverrideError."""
    for name, value in settings.items():
        section, _, field = name.partition(".")
        if section in _PARTS:
            profile = _part(profile, section, field, value)
            if section == "engine":
                config = _pools(config, field, profile)
        elif section == "scheduler" and field == _POLICY:
            raise OverrideError(f"{name}: a run has its policy from --policy")
        elif section == "scheduler":
            config = config.model_copy(
                update={"scheduler": _changed(config.scheduler, name, field.split("."), value)}
            )
        elif section in ENTRY_SECTIONS or (section == "weight" and field):
            path = name if section in ENTRY_SECTIONS else f"tenants.{field}.weight"
            try:
                config = changed_entry(config, path, value)
            except EntryError as error:
                raise OverrideError(f"{name}: {error}") from None
        else:
            raise OverrideError(f"{name}: unknown setting; known are {', '.join(known())}")
    return profile, config


def _part(profile: Profile, section: str, field: str, value: Any) -> Profile:
    """Change one field of a section of the profile; the section's own rules check it."""
    kind = _PARTS[section]
    name = f"{section}.{field}"
    if field not in kind.model_fields:
        raise OverrideError(
            f"{name}: the profile has no such field; known are {', '.join(kind.model_fields)}"
        )
    try:
        changed = kind.model_validate({**getattr(profile, section).model_dump(), field: value})
    except ValidationError as error:
        raise OverrideError(f"{name}: {_reason(error)}, not {value!r}") from None
    return profile.model_copy(update={section: changed})


def _pools(config: Config, field: str, profile: Profile) -> Config:
    """Give the pools of the configuration the same size: they stand for the engines."""
    if field not in _POOL_FIELDS or not config.pools:
        return config
    update = {_POOL_FIELDS[field]: getattr(profile.engine, field)}
    return config.model_copy(
        update={"pools": [pool.model_copy(update=update) for pool in config.pools]}
    )


def _changed(model: M, name: str, path: list[str], value: Any) -> M:
    """Change one leaf of a section; the section's own rules check the value."""
    fields = _aliases(type(model))
    if path[0] not in fields:
        raise OverrideError(f"{name}: unknown setting; known are {', '.join(fields)}")
    field = fields[path[0]]
    here = getattr(model, field)
    if len(path) > 1:
        if not isinstance(here, BaseModel):
            raise OverrideError(f"{name}: {path[0]} has no parts")
        return model.model_copy(update={field: _changed(here, name, path[1:], value)})
    if isinstance(here, BaseModel):
        raise OverrideError(f"{name}: name one of its parts: {', '.join(_aliases(type(here)))}")
    try:
        checked = type(model).model_validate({path[0]: value})
    except ValidationError as error:
        raise OverrideError(f"{name}: {_reason(error)}, not {value!r}") from None
    return model.model_copy(update={field: getattr(checked, field)})


def _reason(error: ValidationError) -> str:
    message = error.errors()[0]["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _aliases(model: type[BaseModel]) -> dict[str, str]:
    """Map each key in the file to its field."""
    return {field.alias or name: name for name, field in model.model_fields.items()}
