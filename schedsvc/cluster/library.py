"""States the requirements on the store: its functions, its keys, and the user of the members."""

from importlib.resources import files

__all__ = [
    "ESCROW_VERSION",
    "FUNCTIONS_VERSION",
    "LIMITS_VERSION",
    "SETTINGS_VERSION",
    "TERMS_VERSION",
    "acl_rules",
    "bucket_keys_of",
    "budget_key_of",
    "escrow_keys_of",
    "escrow_source",
    "functions_source",
    "info_problem",
    "is_replica",
    "keys_of",
    "limits_source",
    "notes_key_of",
    "probe_key_of",
    "settings_keys_of",
    "settings_source",
    "slot_keys_of",
    "term_keys_of",
    "terms_source",
]

#: As in functions.lua; a change of what a function takes or returns raises both.
FUNCTIONS_VERSION = "3"
#: As in terms.lua.
TERMS_VERSION = "2"
#: As in escrow.lua.
ESCROW_VERSION = "2"
#: As in limits.lua.
LIMITS_VERSION = "1"
#: As in settings.lua.
SETTINGS_VERSION = "1"
_VERSION_MIN = (7, 0)
#: Keys of functions.lua, in its order.
_KEYS = ("number", "life", "index", "rows", "members", "origins", "inbox:")
#: Commands that a member sends, and commands that the functions call for it.
_COMMANDS = (
    "auth", "fcall", "hello", "info", "ping", "select",
    "del", "get", "hdel", "hget", "hgetall", "hlen", "hmget", "hset", "hsetnx", "incr", "pexpire",
    "pttl", "set", "time",
    "zadd", "zcard", "zpopmin", "zrange", "zrem",
)  # fmt: skip


def functions_source() -> str:
    """Return the source of the functions, as FUNCTION LOAD takes it."""
    return (files("schedsvc.cluster") / "functions.lua").read_text()


def terms_source() -> str:
    """Return the source of the functions that decide who leads, as FUNCTION LOAD takes it."""
    return (files("schedsvc.cluster") / "terms.lua").read_text()


def escrow_source() -> str:
    """Return the source of the functions that hold quotas' buckets, as FUNCTION LOAD takes it."""
    return (files("schedsvc.cluster") / "escrow.lua").read_text()


def limits_source() -> str:
    """Return the source of the functions for concurrency and budgets, as FUNCTION LOAD takes it."""
    return (files("schedsvc.cluster") / "limits.lua").read_text()


def slot_keys_of(cluster: str, holder: bytes, caps: list[bytes]) -> list[bytes]:
    """Return the keys of schedsvc_slots for a call of a holder about these caps."""
    prefix = f"{{schedsvc:{cluster}}}:".encode()
    return [prefix + b"told:" + holder, *(prefix + b"slots:" + name for name in caps)]


def budget_key_of(cluster: str, name: bytes, period: bytes) -> bytes:
    """Return the key of schedsvc_budgets for a budget in one period."""
    return f"{{schedsvc:{cluster}}}:budget:".encode() + period + b":" + name


def settings_source() -> str:
    """Return the source of the function for operators' settings, as FUNCTION LOAD takes it."""
    return (files("schedsvc.cluster") / "settings.lua").read_text()


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
