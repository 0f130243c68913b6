"""Reads the principals of a configuration, and their tokens wherever they come from."""

import os
from collections.abc import Iterator

import structlog

from schedsvc.config import Config, token_digest
from schedsvc.config.network import Principal
from schedsvc.config.tokens import make_token
from schedsvc.driver import Driver
from schedsvc.service import Credentials, Known

__all__ = ["Callers", "credentials_of", "known_callers", "make_tokens"]

_log = structlog.get_logger("schedsvc.server")

_ALL = ["*"]
_SHARE_PPM = 1_000_000
_NOTHING: dict[str, list[bytes]] = {"pools": [], "tenants": [], "classes": []}


class Callers:
    """Holds the principals of a running scheduler, and the grants that the core has for each."""

    def __init__(self, driver: Driver, config: Config) -> None:
        """Grant the principals of a configuration what it says. Raises ValueError."""
        make_tokens(config)
        self._known = known_callers(config)
        self._auth = config.auth
        self.credentials = Credentials(
            self._known, unlisted_certificates=config.auth.lets_unlisted_in
        )
        self._driver = driver
        self._grant(config)

    def differ(self, known: list[Known], config: Config) -> bool:
        """Return whether these principals, their tokens or grants differ from those in force."""
        return known != self._known or config.auth != self._auth

    def replace(self, known: list[Known], config: Config) -> set[int]:
        """Put the principals of a configuration in force; `known`: its `known_callers()`.

        Returns the principals whose streams have to end, because a proof of theirs is not valid any
        more. O(principals).
        """
        self._known, self._auth = known, config.auth
        before = set(self.credentials.listed)
        ended = self.credentials.replace(known, unlisted_certificates=config.auth.lets_unlisted_in)
        for number in before.difference(self.credentials.listed):
            name = self.credentials.name(number).encode()
            self._driver.set_principal(number, name, _NOTHING)
        self._grant(config)
        return ended

    def _grant(self, config: Config) -> None:
        principals = {principal.name: principal for principal in config.callers()}
        for number, known in self.credentials.listed.items():
            principal = principals[known.name]
            grants = {
                "pools": _patterns(principal.pools),
                "tenants": _patterns(principal.may_vouch_for),
                "classes": _patterns(principal.classes),
                "sees_all": known.sees_all,
                "share_ppm": max(1, round(principal.share_of_places * _SHARE_PPM)),
            }
            self._driver.set_principal(number, known.name.encode(), grants)


def _patterns(names: list[str]) -> list[bytes] | None:
    return None if names == _ALL else [name.encode() for name in names]


def make_tokens(config: Config) -> None:
    """Write the tokens that the scheduler has to make. Raises ValueError. O(principals)."""
    for principal in config.auth.principals:
        if principal.make_token and principal.token_file is not None:
            file = config.resolve(principal.token_file)
            if make_token(file):
                _log.info("token_made", principal=principal.name, file=str(file))


def credentials_of(config: Config) -> Credentials:
    """Make the credentials that a configuration lists. Raises ValueError as `known_callers`."""
    return Credentials(known_callers(config), unlisted_certificates=config.auth.lets_unlisted_in)


def known_callers(config: Config) -> list[Known]:
    """Read tokens from the file, the environment and files. Raises ValueError. O(principals)."""
    return [
        Known(
            name=principal.name,
            tokens=tuple(_digests(config, principal)),
            certificate=principal.certificate,
            listener=principal.listener,
            is_operator=principal.operator,
            is_member=principal.member,
            sees_all=principal.operator or principal.stats == "all",
            events_per_second=principal.events_per_second,
            loop_share=principal.loop_share,
        )
        for principal in config.callers()
    ]


def _digests(config: Config, principal: Principal) -> Iterator[bytes]:
    environ = os.environ
    if principal.sha256 is not None:
        yield token_digest(sha256=principal.sha256, environ=environ)
    if principal.env is not None:
        yield token_digest(env=principal.env, environ=environ)
    if principal.token_file is not None:
        yield token_digest(token_file=config.resolve(principal.token_file), environ=environ)
