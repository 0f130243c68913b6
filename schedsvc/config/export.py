"""Writes tenants as a section of a configuration file."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

__all__ = ["tenants_yaml"]


def tenants_yaml(tenants: Sequence[Mapping[str, Any]]) -> str:
    """Return the section `tenants` with these entries, which are in the form of the file."""
    entries = [dict(tenant) for tenant in tenants]
    return yaml.safe_dump({"tenants": entries}, sort_keys=False, allow_unicode=True, width=100)
