"""Lets operators make, rotate and revoke API keys of tenants while the scheduler runs.

A key that has expired by the wall clock is refused at once, and kept for a day of the scheduler's
running. So a wall clock that is set forward by mistake deletes no key: it counts again once the
clock is right.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from schedsvc_client.v1 import identity_pb2
from schedsvc_client.v1 import operator_pb2 as pb

from schedsvc.config import ApiKey, TenantError, checked_tenant
from schedsvc.driver.clock import wall_ms
from schedsvc.server.operator import OperatorActions
from schedsvc.server.tenants import TenantActions
from schedsvc.service.servicer_base import exhausted, invalid, not_found

__all__ = ["KEPT_S", "KEYS_MAX", "TenantKeys"]

#: API keys of one tenant that operators have made and that have not expired.
KEYS_MAX = 64
#: Expired keys are deleted at the second of two looks, which are this far apart.
KEPT_S = 86_400.0
_SECRET_BYTES = 32
_ID_BYTES = 4
#: Ten years.
_PERIOD_MS_MAX = 10 * 366 * 86_400 * 1_000


class TenantKeys:
    """Keeps the API keys of a server that runs. A key is never kept, only its hash."""

    def __init__(
        self,
        handles: OperatorActions,
        tenants: TenantActions,
        now_ms: Callable[[], int] = wall_ms,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Change the keys of these tenants; `now_ms`: the wall clock, `steady_s`: one never set."""
        self._handles = handles
        #: The operator's actions on the tenants themselves.
        self.tenants = tenants
        self._now_ms = now_ms
        self._steady_s = steady_s
        self._delete_at_s = steady_s() + KEPT_S
        #: Hashes of keys that had expired at the last look for what to delete.
        self._expired: set[str] = set()

    async def create(self, request: pb.CreateTenantKeyRequest) -> pb.CreateTenantKeyResponse:
        """Make a key. Raises CallerError."""
        self._check_name(request.name)
        secret, key = self._new(request.expires_in_ms)
        self._put(request.name, (*self._kept(request.name), key))
        await self.tenants.keep()
        return pb.CreateTenantKeyResponse(api_key=secret, key=_message(key))

    async def rotate(self, request: pb.RotateTenantKeyRequest) -> pb.RotateTenantKeyResponse:
        """Replace a key by a new one. Raises CallerError."""
        grace_ms = _checked_period("grace_ms", request.grace_ms)
        old = self._find(request.name, request.id, self._keys(request.name))
        secret, key = self._new(request.expires_in_ms)
        ends_ms = self._now_ms() + grace_ms
        ending = replace(old, expires_ms=min(ends_ms, old.expires_ms or ends_ms))
        others = tuple(k for k in self._kept(request.name) if k.id != old.id)
        self._put(request.name, (*others, *((ending,) if grace_ms else ()), key))
        await self.tenants.keep()
        return pb.RotateTenantKeyResponse(
            api_key=secret, key=_message(key), old_key=_message(ending)
        )

    async def revoke(self, request: pb.RevokeTenantKeyRequest) -> None:
        """Revoke a key. Raises CallerError."""
        if not request.id:
            raise invalid("id", "is empty; name a key, see ListTenantKeys")
        old = self._find(request.name, request.id, self._kept(request.name))
        self._put(request.name, tuple(k for k in self._kept(request.name) if k.id != old.id))
        await self.tenants.keep()

    def list(self, name: str) -> list[pb.TenantKey]:
        """Return the keys of a tenant, the oldest first."""
        return [_message(key) for key in self._keys(name)]

    def who_is(self, sha256: bytes) -> identity_pb2.WhoIsResponse | None:
        """Return the tenant for which a key stands. O(keys of it)."""
        tenant = self._handles.listed.owner(sha256)
        if tenant is None:
            return None
        digest = sha256.hex()
        entry = self._handles.listed.entries.get(tenant.name)
        if entry and any(k.sha256 == digest and self._is_over(k) for k in entry.keys):
            return None
        return identity_pb2.WhoIsResponse(
            tenant=tenant.name, request_class=tenant.request_class or ""
        )

    def expire(self) -> None:
        """Refuse keys that have expired, and let those count that have not, after a step back.

        Delete what has been expired for long. O(tenants with such keys), O(1) if there are none;
        once a day O(tenants).
        """
        for name in self._handles.listed.look(self._now_ms()):
            # The same entry: each member of a cluster looks at its own clock.
            self.tenants.change(name, self._handles.listed.entries[name])
        if self._steady_s() >= self._delete_at_s:
            self._delete_at_s = self._steady_s() + KEPT_S
            self._delete_expired()

    def _delete_expired(self) -> None:
        before, self._expired = self._expired, set()
        for name, entry in list(self._handles.listed.entries.items()):
            over = {key.sha256 for key in entry.keys if self._is_over(key)}
            if over & before:
                self._put(name, tuple(k for k in entry.keys if k.sha256 not in over & before))
            self._expired |= over - before

    def _is_over(self, key: ApiKey) -> bool:
        return 0 < key.expires_ms <= self._now_ms()

    def _kept(self, name: str) -> tuple[ApiKey, ...]:
        """Return the keys of a tenant, those that have expired too."""
        entry = self._handles.listed.entries.get(name)
        return entry.keys if entry else ()

    def _keys(self, name: str) -> tuple[ApiKey, ...]:
        return tuple(k for k in self._kept(name) if not self._is_over(k))

    def _check_name(self, name: str) -> None:
        """Raise CallerError if no tenant can have this name."""
        try:
            checked_tenant(name, {}, self._handles.config)
        except TenantError as error:
            raise invalid(error.field, error.description) from None
        self.tenants.check_room(name)

    def _new(self, expires_in_ms: int) -> tuple[str, ApiKey]:
        period_ms, now_ms = _checked_period("expires_in_ms", expires_in_ms), self._now_ms()
        secret = f"sk-{secrets.token_urlsafe(_SECRET_BYTES)}"
        digest = hashlib.sha256(secret.encode()).hexdigest()
        expires_ms = now_ms + period_ms if period_ms else 0
        return secret, ApiKey(secrets.token_hex(_ID_BYTES), digest, now_ms, expires_ms)

    def _find(self, name: str, key_id: str, keys: Iterable[ApiKey]) -> ApiKey:
        keys = list(keys)
        named = [key for key in keys if key.id == key_id] if key_id else keys
        if len(named) == 1:
            return named[0]
        known = ", ".join(key.id for key in keys) or "none"
        if key_id or not keys:
            raise not_found("id", f"tenant {name!r} has no key {key_id!r} (known: {known})")
        raise invalid("id", f"is empty, but tenant {name!r} has several keys; name one of {known}")

    def _put(self, name: str, keys: tuple[ApiKey, ...]) -> None:
        listed = self._handles.listed
        before = listed.entries.get(name)
        over = sorted(filter(self._is_over, keys), key=lambda key: key.expires_ms)
        # Expired keys make room first.
        dropped = over[: max(0, len(keys) - KEYS_MAX)]
        keys = tuple(key for key in keys if key not in dropped)
        if len(keys) > KEYS_MAX:
            raise exhausted(
                "name", f"tenant {name!r} has {KEYS_MAX} keys, which is the most: revoke some"
            )
        terms = None if before is None else before.terms
        entry = listed.next_entry(terms, keys)
        is_gone = terms is None and not keys
        self.tenants.change(name, None if is_gone else entry, self._now_ms() if is_gone else 0)


def _checked_period(field: str, period_ms: int) -> int:
    if not 0 <= period_ms <= _PERIOD_MS_MAX:
        raise invalid(field, f"is {period_ms}; it must be from 0 to {_PERIOD_MS_MAX}, ten years")
    return period_ms


def _message(key: ApiKey) -> pb.TenantKey:
    return pb.TenantKey(id=key.id, created_unix_ms=key.created_ms, expires_unix_ms=key.expires_ms)
