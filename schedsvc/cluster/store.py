"""Opens one connection to a Valkey or Redis server, with a bound on every wait.

The caller opens a connection, calls functions, and drops it after the first error. Nothing here
reconnects by itself, because a member has to send all its totals again on a new connection.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import redis.exceptions
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from schedsvc.cluster.errors import StoreError, StoreRefusedError, Words, WritesRefusedError
from schedsvc.cluster.library import LIBRARY_VERSION, info_problem, is_replica, probe_key_of
from schedsvc.config.cluster import Cluster, ClusterStore
from schedsvc.config.files import read_file

__all__ = [
    "CALL_S",
    "Address",
    "StoreConnection",
    "check_writes",
    "connect",
    "open_any",
    "open_checked",
    "version_of",
]

#: A connection is made, and a call answered, within this time, or it failed.
CALL_S = 1.0
_PORT = 6_379
#: The error of a function that calls a command which its user must not: in Valkey and Redis 7.2,
#: and earlier.
_ACL_FAILURES = ("ACL failure in script", "The user executing the script can't run this command")
#: Refusals of a write for which the library has no class; the server still answers reads.
_WRITE_FAILURES = ("MISCONF", "NOREPLICAS")
_REPLICA = "is a read-only replica; name its primary in cluster.store.urls"
_INIT = "run `schedsvc cluster init` with an operator's credentials"


@dataclass(frozen=True)
class Address:
    """Says where a server is, and how a client proves who it is."""

    host: str
    port: int
    user: str | None
    password: str | None
    tls: dict[str, Any] | None = None
    #: The advice for a person if the server refuses this user.
    hint: str = f"check cluster.store.password_file, or {_INIT}"

    @property
    def text(self) -> str:
        """Return the address for people."""
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: str, store: ClusterStore, resolve: Callable[[str], Path]) -> "Address":
        """Read a URL of the configuration and its password file. Raises StoreError."""
        parts: SplitResult = urlsplit(url)
        password = None
        if store.password_file is not None:
            path = resolve(store.password_file)
            try:
                password = read_file(path).decode().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise StoreError(f"cannot read cluster.store.password_file {path}: {error}") from (
                    error
                )
        tls = None
        if parts.scheme == "rediss":
            files = {} if store.tls is None else store.tls.model_dump(exclude_none=True)
            names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
            tls = {names[key]: str(resolve(file)) for key, file in files.items()}
        return cls(parts.hostname or "", parts.port or _PORT, parts.username, password, tls)


def _dial(address: Address) -> Any:
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "username": address.user if address.password else None,
        "password": address.password,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CALL_S,
        # With a timeout the library calls asyncio.wait_for(), which in Python 3.11 ignores a
        # cancellation that arrives in the moment in which the wait ends.
        "socket_timeout": None,
    }
    if address.tls is None:
        return Connection(**options)
    return SSLConnection(
        **options,
        **address.tls,
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
        ssl_min_version=ssl.TLSVersion.TLSv1_2,
    )


#: Makes a connection of the library; a simulator puts one of its own world here.
dial: Callable[[Address], Any] = _dial


class StoreConnection:
    """Holds one connection. Every method raises StoreError or StoreRefusedError."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._connection = dial(address)

    async def open(self) -> None:
        """Connect and prove who this is."""
        await self._bounded(self._connection.connect(), "cannot connect")

    async def command(self, *words: str | bytes | int) -> Any:
        """Send one command and return the answer, with texts as bytes."""
        try:
            return await self._bounded(self._ask(words), f"{words[0]!s} failed")
        except WritesRefusedError as error:
            error.words = words
            raise

    async def call(
        self, function: str, keys: list[str] | list[bytes], *args: str | bytes | int
    ) -> Any:
        """Call a function of the store."""
        return await self.command("FCALL", function, len(keys), *keys, *args)

    async def close(self) -> None:
        """Hang up; never raises."""
        try:
            async with asyncio.timeout(CALL_S):
                await self._connection.disconnect(nowait=True)
        except (OSError, TimeoutError, redis.exceptions.RedisError):
            pass

    async def _ask(self, words: Words) -> Any:
        await self._connection.send_command(*words, check_health=False)
        return await self._connection.read_response(disable_decoding=True)

    async def _bounded(self, work: Any, what: str) -> Any:
        where = f"store {self.address.text}"
        try:
            async with asyncio.timeout(CALL_S):
                return await work
        except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            user = self.address.user or "default"
            is_unknown = isinstance(error, redis.exceptions.AuthenticationError)
            raise (StoreRefusedError if is_unknown else WritesRefusedError)(
                f"{where} refuses user {user}: {error}; {self.address.hint}"
            ) from None
        except redis.exceptions.ReadOnlyError:
            raise WritesRefusedError(f"{where} {_REPLICA}") from None
        except redis.exceptions.OutOfMemoryError as error:
            raise WritesRefusedError(
                f"{where} refuses writes: OOM {error}; raise maxmemory of the store"
            ) from None
        except redis.exceptions.ResponseError as error:
            if str(error).startswith(_WRITE_FAILURES):
                raise WritesRefusedError(f"{where} refuses writes: {error}") from None
            if any(words in str(error) for words in _ACL_FAILURES):
                user = self.address.user or "default"
                # The place in the script differs from call to call, and the reason does not.
                reason = str(error).partition(" script: ")[0]
                raise WritesRefusedError(
                    f"{where} gives user {user} no write permission: {reason}; {_INIT}"
                ) from None
            if "unction not found" in str(error):
                raise StoreRefusedError(f"{where} has no functions of schedsvc; {_INIT}") from None
            raise StoreError(f"{where}: {what}: {error}") from None
        except TimeoutError:
            raise StoreError(f"{where}: {what}: no answer within {CALL_S:g} s") from None
        except (OSError, EOFError, redis.exceptions.RedisError) as error:
            raise StoreError(f"{where}: {what}: {str(error) or type(error).__name__}") from None


async def connect(address: Address) -> StoreConnection:
    """Return an open connection. Raises StoreError."""
    connection = StoreConnection(address)
    try:
        await connection.open()
    except BaseException:
        await connection.close()
        raise
    return connection


async def open_checked(address: Address) -> StoreConnection:
    """Return a connection to a server that a cluster can read.

    Raises StoreError, and StoreRefusedError with what has to be changed.
    """
    connection = await connect(address)
    try:
        info = (await connection.command("INFO")).decode(errors="replace")
        if is_replica(info):
            raise WritesRefusedError(f"store {address.text} {_REPLICA}")
        if problem := info_problem(info):
            raise StoreRefusedError(f"store {address.text} {problem}")
        found = await version_of(connection)
        if found != LIBRARY_VERSION:
            raise StoreRefusedError(
                f"store {address.text} has functions of version {found}, and this schedsvc needs"
                f" version {LIBRARY_VERSION}; {_INIT} of this schedsvc"
            )
    except BaseException:
        await connection.close()
        raise
    return connection


async def version_of(link: StoreConnection) -> str:
    """Return the version of the functions that the store has. Raises StoreRefusedError if none."""
    found: bytes = await link.call("schedsvc_version", [])
    return found.decode(errors="replace")


async def check_writes(link: StoreConnection, cluster: str, refused: Words = ()) -> None:
    """Raise WritesRefusedError if the store refuses one of the commands that write.

    `refused`: a call that it refused before. Its words go along without an effect, because a store
    near its limit of memory takes what is smaller.
    """
    try:
        await link.call("schedsvc_probe", [probe_key_of(cluster)], *refused)
    except WritesRefusedError as error:
        error.words = refused
        raise


async def _open_written(address: Address, cluster: str, refused: Words) -> StoreConnection:
    """Return a connection to a server that has answered writes. Raises as open_checked()."""
    connection = await open_checked(address)
    try:
        await check_writes(connection, cluster, refused)
    except BaseException:
        await connection.close()
        raise
    return connection


async def open_any(
    cluster: Cluster,
    resolve: Callable[[str], Path],
    order: list[str] | None = None,
    refused: Words = (),
    prepare: Callable[[StoreConnection], Awaitable[object]] | None = None,
) -> StoreConnection:
    """Return a connection to the first server of a list that answers writes, prepared.

    An answered read says nothing: a store may answer each of them and refuse all writes, or those
    that are as large as `refused`, a call that it refused before.
    `order` holds the servers' URLs between the calls: the one used last comes first, and one tried
    without success last. So if a server hangs, and the caller cancels the call, the next one begins
    with another server. Raises StoreError, with the problem of each server, and what `prepare`
    raises.
    """
    problems: dict[str, StoreError] = {}
    store = cluster.store
    order = list(store.urls) if order is None else order
    for url in tuple(order):
        order.remove(url)
        order.append(url)
        try:
            link = await _open_written(Address.of(url, store, resolve), cluster.name, refused)
        except StoreError as error:
            problems[url] = error
            continue
        try:
            if prepare is not None:
                await prepare(link)
        except BaseException:
            await link.close()
            raise
        order.remove(url)
        order.insert(0, url)
        return link
    kinds = (WritesRefusedError, StoreRefusedError, StoreError)
    kind = next(k for k in kinds if any(isinstance(each, k) for each in problems.values()))
    # In one order, so that the same reason reads the same at each try.
    raise kind("; ".join(str(problems[url]) for url in store.urls if url in problems))
