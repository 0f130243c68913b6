"""Lets an operator list, get, set and delete tenants while the scheduler runs."""

from collections.abc import Awaitable, Callable
from typing import Any

from schedsvc_client.v1 import operator_pb2 as pb

from schedsvc.config import (
    UNKNOWN_TENANT,
    OperatorEntry,
    Tenant,
    TenantError,
    change_tenant,
    checked_tenant,
    file_form,
    rule_tenant,
)
from schedsvc.driver import Driver
from schedsvc.driver.clock import wall_ms
from schedsvc.metrics import Metrics
from schedsvc.server.operator import OperatorActions
from schedsvc.service.servicer_base import exhausted, invalid, not_found, unavailable, untimely

__all__ = ["OPERATOR_TENANTS_MAX", "TenantActions"]

#: Tenants that operators may have set at a time.
OPERATOR_TENANTS_MAX = 100_000
#: Tenants that are looked at for one page.
_LOOKS = 4_096
_LISTED, _RULE = "listed:", "rule:"
_BUDGETS = ("tokens_per_day", "tokens_per_month")
_LIMITS = (
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_minute",
    "concurrency",
)


class TenantActions:
    """Keeps the tenants of a server that runs."""

    def __init__(
        self,
        driver: Driver,
        handles: OperatorActions,
        metrics: Metrics,
        saved: Callable[[], Awaitable[None]],
        moved: Callable[[str, Tenant | None], None],
    ) -> None:
        """Change the tenants of `handles`. `saved` waits until the state file has every change.

        It raises OSError if the file cannot be written. `moved` gets each tenant that has changed.
        """
        self._driver = driver
        self._handles = handles
        self._metrics = metrics
        self._saved = saved
        self._moved = moved

    def page(self, origin: int, size: int, token: str) -> tuple[list[pb.Tenant], str]:
        """Return tenants, and where to go on. Raises CallerError. O(size)."""
        if token.startswith(_RULE):
            return self._rule_page(size, token.removeprefix(_RULE))
        if token and not token.startswith(_LISTED):
            raise invalid("page_token", "is of no page")
        found: list[pb.Tenant] = []
        listed, last = self._handles.listed, token.removeprefix(_LISTED)
        for name in listed.names_after(last, _LOOKS):
            last = name
            if origin in (pb.TENANT_ORIGIN_UNSPECIFIED, self._origin(name)):
                found.append(self._message(listed.in_force[name]))
                if len(found) == size:
                    break
        if listed.names_after(last, 1):
            return found, _LISTED + last
        only_listed = (pb.TENANT_ORIGIN_OPERATOR, pb.TENANT_ORIGIN_FILE)
        return found, "" if origin in only_listed else f"{_RULE}0"

    def _rule_page(self, size: int, at: str) -> tuple[list[pb.Tenant], str]:
        if not at.isdecimal() or len(at) > 9:
            raise invalid("page_token", "is of no page")
        following, names = self._driver.change(lambda core, _: core.born_tenants(int(at), size))
        config = self._handles.config
        rows = [self._message(rule_tenant(name.decode(), config)) for name in names]
        return rows, f"{_RULE}{following}" if following else ""

    def get(self, name: str) -> pb.Tenant:
        """Return a tenant. Raises CallerError."""
        known = self._driver.change(lambda core, _: core.is_known(name.encode()))
        if not known or name == UNKNOWN_TENANT:
            raise not_found("name", f"no operator, file or request has named a tenant {name!r}")
        return self._message(self._handles.listed.current(name))

    async def set(self, request: pb.SetTenantRequest) -> pb.Tenant:
        """Change fields of a tenant; all others stay as they are in force. Raises CallerError."""
        name, listed = request.name, self._handles.listed
        self._check_version(name, request)
        self.check_room(name)
        terms = _merged(file_form(listed.current(name)), request)
        others = (other for other in listed.in_force.values() if other.name != name)
        try:
            checked_tenant(name, terms, self._handles.config, others)
        except TenantError as error:
            raise invalid(error.field, error.description) from None
        before = listed.entries.get(name)
        keys = () if before is None else before.keys
        self.change(name, listed.next_entry(terms, keys))
        answer = self._message(listed.in_force[name])
        await self.keep()
        return answer

    async def delete(self, request: pb.DeleteTenantRequest) -> pb.DeleteTenantResponse:
        """Delete an operator's entry. Raises CallerError."""
        name, listed = request.name, self._handles.listed
        if name not in listed.entries:
            advice = "; remove it from the file" if name in listed.in_force else ""
            raise not_found("name", f"no operator has set a tenant {name!r}{advice}")
        self._check_version(name, request)
        keys = sum(not listed.is_over(key) for key in listed.entries[name].keys)
        self.change(name, None, wall_ms())
        answer = pb.DeleteTenantResponse(fallback=self._origin(name), keys_revoked=keys)
        await self.keep()
        return answer

    def _check_version(
        self, name: str, request: pb.SetTenantRequest | pb.DeleteTenantRequest
    ) -> None:
        entry = self._handles.listed.entries.get(name)
        version = 0 if entry is None else entry.version
        if request.HasField("if_version") and request.if_version != version:
            raise untimely(
                "if_version", f"is {request.if_version}, but the tenant has version {version}"
            )

    def check_room(self, name: str) -> None:
        """Raise CallerError if operators can set no further tenant."""
        entries = self._handles.listed.entries
        if name not in entries and len(entries) >= OPERATOR_TENANTS_MAX:
            raise exhausted(
                "name",
                f"operators have set {OPERATOR_TENANTS_MAX:,} tenants, which is the most: delete"
                " some, or write them into the configuration",
            )

    def change(self, name: str, entry: OperatorEntry | None, gone_ms: int = 0) -> None:
        """Put another entry in force, or none. Raises CallerError, and then nothing changes.

        `gone_ms`: now by the wall clock, if an operator has deleted it.
        """
        listed, modes = self._handles.listed, self._driver.mode_overlay
        before, after = listed.in_force.get(name), listed.after(name, entry)
        old, new = (tenant and modes.of(tenant) for tenant in (before, after))
        config = self._handles.config
        if before is not None and after is None:
            self._metrics.remove(name)
        try:
            self._driver.change(lambda core, now: change_tenant(core, config, old, new, now))
        except Exception:
            # The core had accepted what was in force.
            self._driver.change(lambda core, now: change_tenant(core, config, new, old, now))
            raise
        listed.put(name, entry, gone_ms)
        self._moved(name, after)
        if before is None and after is not None:
            self._metrics.add(name)

    async def keep(self) -> None:
        """Wait until the state file has every change. Raises CallerError."""
        try:
            await self._saved()
        except OSError as error:
            raise unavailable(
                f"the change is in force, but a restart would lose it: {error}"
            ) from None

    def _origin(self, name: str) -> pb.TenantOrigin.ValueType:
        entry = self._handles.listed.entries.get(name)
        if entry is not None and entry.terms is not None:
            return pb.TENANT_ORIGIN_OPERATOR
        listed = self._handles.listed.fallback(name) is not None
        return pb.TENANT_ORIGIN_FILE if listed else pb.TENANT_ORIGIN_RULE

    def _message(self, tenant: Tenant) -> pb.Tenant:
        entry = self._handles.listed.entries.get(tenant.name)
        passing = {key.sha256 for key in entry.keys if key.expires_ms} if entry else set()
        quota, share = tenant.quota, tenant.share
        message = pb.Tenant(
            name=tenant.name,
            origin=self._origin(tenant.name),
            version=0 if entry is None else entry.version,
            weight_milli=tenant.weight_milli,
            group=tenant.group or "",
            over="" if quota is None else quota.over,
            request_class=tenant.request_class or "",
            classes=tenant.classes or (),
            mode=tenant.mode or "",
            api_keys_sha256=[
                bytes.fromhex(key) for key in tenant.api_keys_sha256 if key not in passing
            ],
        )
        if quota is not None:
            limits = {limit: getattr(quota, limit) or 0 for limit in _LIMITS}
            message.MergeFrom(pb.Tenant(**limits))  # type: ignore[arg-type] # numbers all
        if share is not None:
            message.share.CopyFrom(pb.TenantShare(**share.model_dump(exclude_none=True)))
        if tenant.budget is not None:
            budget = tenant.budget.model_dump(exclude_none=True)
            message.budget.CopyFrom(pb.TenantBudget(**budget))
        return message


def _section(
    terms: dict[str, Any], request: pb.SetTenantRequest, name: str, keys: tuple[str, ...]
) -> dict[str, Any]:
    """Return a section of terms with what a request changes of it."""
    section = dict(terms.get(name, {}))
    for key in keys:
        if request.HasField(f"{name}_{key}"):  # type: ignore[arg-type] # one of its names
            section[key] = getattr(request, f"{name}_{key}")
    return section


def _merged(terms: dict[str, Any], request: pb.SetTenantRequest) -> dict[str, Any]:
    """Return terms in the form of the file with what a request changes."""
    if request.HasField("weight_milli"):
        terms["weight"] = request.weight_milli / 1_000
    for field, key in (("group", "group"), ("request_class", "class")):
        if request.HasField(field):  # type: ignore[arg-type] # one of its names
            terms[key] = getattr(request, field)
    if request.HasField("classes"):
        terms["classes"] = list(request.classes.names)
    share = _section(terms, request, "share", ("tokens_per_minute", "lends", "borrows"))
    terms["share"] = {key: value for key, value in share.items() if value != -1}
    if share.get("tokens_per_minute") == 0:
        terms["share"] = None
    budget = _section(terms, request, "budget", (*_BUDGETS, "timezone"))
    budget = {key: value for key, value in budget.items() if value}
    terms["budget"] = budget if budget.keys() & set(_BUDGETS) else None
    quota = dict(terms.get("quota", {}))
    for limit in (*_LIMITS, "over"):
        if request.HasField(limit):  # type: ignore[arg-type] # one of its names
            quota[limit] = getattr(request, limit)
    quota = {key: value for key, value in quota.items() if value}
    terms["quota"] = quota if quota.keys() - {"over"} else None
    if quota.get("over") not in (None, "wait") and not terms["quota"]:
        terms["quota"] = quota
    return {key: value for key, value in terms.items() if value not in (None, "", [], {})}
