"""Writes the tenants of a running scheduler in the form of the configuration file."""

from typing import Any

from schedsvc_client.operator import ORIGINS, Operator

__all__ = ["LIMITS", "listed_tenants", "origin_of", "tenant_entry", "weight_of"]

LIMITS = (
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_minute",
    "concurrency",
)


def origin_of(tenant: Any) -> str:
    """Name the origin of a tenant: operator, file or rule."""
    return next(name for name, number in ORIGINS.items() if number == tenant.origin)


def weight_of(tenant: Any) -> int | float:
    """Return a weight as the file writes it."""
    milli = int(tenant.weight_milli)
    return milli / 1_000 if milli % 1_000 else milli // 1_000


def tenant_entry(tenant: Any) -> dict[str, Any]:
    """Return a tenant in the form of the file."""
    quota = {limit: getattr(tenant, limit) for limit in LIMITS if getattr(tenant, limit)}
    if (quota and tenant.over) or tenant.over == "refuse":
        quota["over"] = tenant.over
    share = {}
    if tenant.HasField("share"):
        share = {field.name: value for field, value in tenant.share.ListFields()}
    budget = {field.name: value for field, value in tenant.budget.ListFields()}
    entry = {
        "name": tenant.name,
        "weight": weight_of(tenant),
        "group": tenant.group,
        "quota": quota,
        "share": share,
        "budget": budget,
        "class": tenant.request_class,
        "classes": list(tenant.classes),
        "mode": tenant.mode,
        "api_keys_sha256": [key.hex() for key in tenant.api_keys_sha256],
    }
    return {key: value for key, value in entry.items() if value}


def listed_tenants(operator: Operator) -> list[dict[str, Any]]:
    """Return the tenants that an operator or the file lists, in its form. O(tenants)."""
    return [tenant_entry(row) for row in operator.tenants() if origin_of(row) != "rule"]
