"""The acts and grants of a hostile principal, drawn for the seeds that have one."""

from dataclasses import dataclass
from random import Random

from schedsvc_lab.faults.auditor import Grants

HOSTILE = 1 << 48
"""Seeds from here on have a principal that acts against all others."""

HOSTILE_TREES = 1 << 53
"""Seeds from here on have such a principal, and groups with a weight."""

CLOSING = 15 << 50
"""Seeds from here on have such a principal and draw pools that take only requests that name them,
if it may not offer every pool."""

PRINCIPAL = 9
TENANT = "mal"
POOLS = 24
"""The number of names that the principal has for pools of its own."""

_MS = 1_000_000
_EVERYTHING = ("*",)

HOSTILE_FAULTS = {
    # name: (how often it is chosen, what it does)
    "foreign-replay": (4, "it replays leases of others and invented ones into their pools"),
    "foreign-report": (4, "it reports on leases of others, by copied and guessed ids"),
    "foreign-complete": (4, "it completes leases of others, by copied and guessed ids"),
    "foreign-cancel": (2, "it cancels and asks under tags that others use on their streams"),
    "foreign-telemetry": (2, "it reports telemetry of the pools of others"),
    "foreign-name": (2, "it asks for tenants of others"),
    "foreign-goodbye": (2, "it says goodbye, and offers a pool of others on another stream"),
    "ids-reserved": (3, "it asks under the request ids that others use, and will use next"),
    "usage-false": (4, "it reports and completes its own leases with false totals"),
    "pool-squatted": (4, "it offers a pool of others, also while its owner reconnects"),
    "pools-taken": (2, "it offers as many pools as a stream may"),
    "sessions-taken": (1, "it opens as many streams as it can"),
    "adapters-taken": (2, "it asks for adapters that no other request uses"),
    "queue-flooded": (3, "it asks for dozens of requests at once"),
    "answers-flooded": (3, "it completes requests as soon as they are granted"),
    "leases-flooded": (3, "it replays dozens of invented leases into its own pools"),
    "queue-of-another-filled": (3, "it asks for dozens of requests of one tenant of others"),
}
"""The acts of a principal against others."""

CLOSING_FAULTS = {
    "pools-relisted": (30, "a reload lists other pools, so that some take requests without a name"),
}
"""Acts of an operator because of such a principal."""


@dataclass(frozen=True)
class HostileOptions:
    """Describes a principal that acts against all others."""

    grants: Grants
    strikes_ns: int  # between two of its acts, on average
    waiting_max: int  # for its own honest requests
    closed: frozenset[str] = frozenset()  # pools that take only requests that name them
    duel: bool = False  # the seed runs twice, to compare what others got
    size: tuple[int, int] | None = None  # prompt and output of all requests of a duel


def draw_closed(seed: int, grants: Grants, names: list[str]) -> frozenset[str]:
    """Draw the pools that the configuration does not list, of those that the principal bars."""
    rnd = Random(seed ^ 0xC105ED)  # noqa: S311 - no secret: one seed is one run
    if grants.pools == _EVERYTHING or rnd.random() < 0.2:
        return frozenset()
    return frozenset(name for name in names if rnd.random() < 0.5)


def draw_hostile(seed: int, *, fair: bool) -> tuple[HostileOptions, dict[str, object]]:
    """Draw what the principal is granted; `fair`: for a comparison of two runs.

    Also returns settings of the core: tables so small that a principal can try to fill them.
    """
    rnd = Random(seed ^ 0xBAD)  # noqa: S311 - no secret: one seed is one run
    own = ("mal-*",)
    grants = Grants(
        principal=PRINCIPAL,
        pools=rnd.choice((own, _EVERYTHING)),
        tenants=rnd.choice(((TENANT,), (TENANT,), (TENANT, "mal-*"), _EVERYTHING)),
        share_ppm=rnd.choice((50_000, 250_000, 500_000)),
    )
    options = HostileOptions(
        grants=Grants(PRINCIPAL, grants.pools, (TENANT,), 250_000) if fair else grants,
        strikes_ns=rnd.choice((5 * _MS, 30 * _MS, 100 * _MS)),
        waiting_max=rnd.choice((1, 4, 20)),
        duel=fair,
    )
    core: dict[str, object] = {"sessions_max": 64, "leases_max": 2_000, "adapters_max": 16}
    if not fair:
        core["answers_max"] = rnd.choice((0, 5, 40, 100_000))
        if rnd.random() < 0.5:
            core["lease_seed"] = f"{seed:032x}"
    return options, core
