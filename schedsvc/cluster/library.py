"""States the requirements on the store: its functions, its keys, and the user of the members."""

from importlib.resources import files

__all__ = [
    "LIBRARY",
    "LIBRARY_VERSION",
    "acl_rules",
    "bucket_keys_of",
    "budget_key_of",
    "escrow_keys_of",
    "info_problem",
    "is_replica",
    "keys_of",
    "library_source",
    "notes_key_of",
    "probe_key_of",
    "settings_keys_of",
    "slot_keys_of",
    "term_keys_of",
]

#: A change of what a function takes or returns raises it.
LIBRARY_VERSION = "4"
LIBRARY = "schedsvc"
#: Each part but the first is a block of its own.
_PARTS = ("common.lua", "totals.lua", "terms.lua", "escrow.lua", "limits.lua", "settings.lua")
_VERSION_MIN = (7, 0)
#: Keys of totals.lua, in its order.
_KEYS = ("number", "life", "index", "rows", "members", "origins", "inbox:")
#: Commands that a member sends, and commands that the functions call for it.
_COMMANDS = (
    "auth", "fcall", "hello", "info", "ping", "select",
    "del", "get", "hdel", "hget", "hgetall", "hlen", "hmget", "hset", "hsetnx", "incr", "pexpire",
    "pttl", "set", "time",
    "zadd", "zcard", "zpopmin", "zrange", "zrem",
)  # fmt: skip


def library_source(version: str = LIBRARY_VERSION) -> str:
    """Return the functions of the store as one library, as FUNCTION LOAD takes it."""
    common, *parts = ((files("schedsvc.cluster") / name).read_text() for name in _PARTS)
    head = f"#!lua name={LIBRARY}\nlocal VERSION = '{version}'\n"
    return head + common + "".join(f"do\n{part}end\n" for part in parts)


def slot_keys_of(cluster: str, holder: bytes, caps: list[bytes]) -> list[bytes]:
    """Return the keys of schedsvc_slots for a call of a holder about these caps."""
    prefix = f"{{schedsvc:{cluster}}}:".encode()
    return [prefix + b"told:" + holder, *(prefix + b"slots:" + name for name in caps)]


def budget_key_of(cluster: str, name: bytes, period: bytes) -> bytes:
    """Return the key of schedsvc_budgets for a budget in one period."""
    return f"{{schedsvc:{cluster}}}:budget:".encode() + period + b":" + name


def settings_keys_of(cluster: str) -> list[str]:
    """Return the keys of settings.lua."""
    names = "number", "life", "index", "rows"
    return [f"{{schedsvc:{cluster}}}:settings:{name}" for name in names]


def escrow_keys_of(cluster: str, origin: bytes, buckets: list[bytes]) -> list[bytes]:
    """Return the keys of escrow.lua for a call of an origin about these buckets."""
    prefix = f"{{schedsvc:{cluster}}}:".encode()
    own = prefix + b"recalls:" + origin, prefix + b"buckets-life"
    return [*own, *bucket_keys_of(cluster, buckets)]


def bucket_keys_of(cluster: str, buckets: list[bytes]) -> list[bytes]:
    """Return the keys of these buckets, as schedsvc_forgive takes them."""
    prefix = f"{{schedsvc:{cluster}}}:bucket:".encode()
    return [prefix + name for name in buckets]


def term_keys_of(cluster: str, pool_set: str) -> list[str]:
    """Return the keys of terms.lua for a set of a cluster."""
    names = f"term:{pool_set}", "terms", f"standbys:{pool_set}"
    return [f"{{schedsvc:{cluster}}}:{name}" for name in names]


def notes_key_of(cluster: str, pool_set: str) -> str:
    """Return the key of the notes that the members of a set leave for people."""
    return f"{{schedsvc:{cluster}}}:notes:{pool_set}"


def probe_key_of(cluster: str) -> str:
    """Return the key that schedsvc_probe writes and removes."""
    return f"{{schedsvc:{cluster}}}:probe"


def keys_of(cluster: str) -> list[str]:
    """Return the keys of a cluster, all in one hash slot."""
    return [f"{{schedsvc:{cluster}}}:{key}" for key in _KEYS]


def acl_rules(cluster: str) -> list[str]:
    """Return what the user of a cluster's members may do, as ACL SETUSER takes it."""
    return ["-@all", *(f"+{name}" for name in _COMMANDS), f"~{{schedsvc:{cluster}}}:*"]


def _fields(info: str) -> dict[str, str]:
    lines = (line.partition(":") for line in info.splitlines() if ":" in line)
    return {key: value.strip() for key, _, value in lines}


def is_replica(info: str) -> bool:
    """Return whether a server with this answer to INFO follows another one."""
    return _fields(info).get("role") == "slave"


def info_problem(info: str) -> str:
    """Return why a server with this answer to INFO cannot be a store; empty if it can."""
    found = _fields(info)
    version = found.get("redis_version", "")
    parts = [int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]]
    if tuple(parts) < _VERSION_MIN:
        return f"runs version {version or 'unknown'}; use Valkey, or Redis 7.0 or newer"
    if found.get("cluster_enabled") == "1":
        return "runs as Redis Cluster, which is not supported; use a single server"
    policy = found.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        return f"may evict keys (maxmemory-policy {policy}); set maxmemory-policy to noeviction"
    return ""
