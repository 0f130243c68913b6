"""Reasons for which a real store answers every read and refuses writes, begun and ended."""

from collections.abc import Callable
from dataclasses import dataclass

from .store_server import StoreServer


@dataclass(frozen=True)
class Refusal:
    """Pairs one reason with a part of a member's report."""

    begin: Callable[[StoreServer], None]
    end: Callable[[StoreServer], None]
    reason: str


def _set(name: str, value: str) -> Callable[[StoreServer], None]:
    return lambda store: _done(store, "CONFIG", "SET", name, value)


def _done(store: StoreServer, *words: str) -> None:
    assert store.ask(*words) == b"+OK\r\n", words


def _lose_snapshot(store: StoreServer) -> None:
    """Let a snapshot fail: a folder stands where its file would be."""
    (store.folder / "dump.rdb").mkdir(exist_ok=True)
    store.ask("BGSAVE")
    while b"rdb_last_bgsave_status:err" not in store.ask("INFO", "persistence"):
        pass
    _done(store, "CONFIG", "SET", "save", "3600 1")


REFUSALS = {
    "memory": Refusal(
        _set("maxmemory", "1"), _set("maxmemory", "0"), "OOM command not allowed"
    ),
    "replicas": Refusal(
        _set("min-replicas-to-write", "1"), _set("min-replicas-to-write", "0"), "NOREPLICAS"
    ),
    "acl": Refusal(
        lambda store: _done(store, "ACL", "SETUSER", "default", "-@write"),
        lambda store: _done(store, "ACL", "SETUSER", "default", "+@all"),
        "gives user default no write permission",
    ),
    "snapshot": Refusal(_lose_snapshot, _set("save", ""), "MISCONF"),
    "replica": Refusal(
        lambda store: _done(store, "REPLICAOF", "127.0.0.1", "1"),
        lambda store: _done(store, "REPLICAOF", "NO", "ONE"),
        "is a read-only replica",
    ),
}  # fmt: skip
