"""Random walks over the events of the core; an input is the seed of one.

They reach what no parser does: groups that a reload moves, sessions of agents, several pools,
quotas, restarts, and other members of a cluster. In the core that watches its memory each element
that is added moves its array, so the use of a pointer from before ends the process.
"""

from collections.abc import Callable
from random import Random

from schedsvc_lab.faults.hostile_options import HOSTILE
from schedsvc_lab.faults.run import Case, run_case
from tests.core.random_walk import RandomWalk
from tests.core.session_histories import SessionHistory
from tests.core.test_agent_sessions import SessionWalk
from tests.core.test_random_walk import twin_walk
from tests.core.test_remote_service import SharedWalk
from tests.core.test_tree import TreeWalk
from tests.core.test_views import Watched
from tests.core.tree_histories import TreeHistory

POLICIES = ("vtc", "vtc-predict", "lcf", "dlpm", "fcfs", "sif")
EVENTS = 300


def _walk(walk: RandomWalk) -> None:
    walk.run(EVENTS, check_every=100)
    walk.drain()


def _plain(rnd: Random) -> None:
    small = rnd.choice((0, 0, 70))  # more than the tree and the positions of flows can have
    policy = rnd.choice(POLICIES)
    _walk(RandomWalk(rnd.getrandbits(32), policy, small_pools=small, pools=rnd.randint(1, 3)))


def _tree(rnd: Random) -> None:
    policies = tuple(rnd.choices(POLICIES, k=rnd.randint(1, 2)))
    _walk(TreeWalk(rnd.getrandbits(32), policies, pools=rnd.randint(1, 3)))


def _agents(rnd: Random) -> None:
    _walk(SessionWalk(rnd.getrandbits(32), rnd.choice(POLICIES), pools=rnd.randint(1, 3)))


def _member(rnd: Random) -> None:
    _walk(SharedWalk(rnd.getrandbits(32), remote=True))


def _views(rnd: Random) -> None:
    Watched(rnd.getrandbits(32), rnd.choice(POLICIES)).run(EVENTS // 10, check_every=10)


def _hostile(rnd: Random) -> None:
    outcome = run_case(Case(HOSTILE + rnd.getrandbits(32), EVENTS))
    assert not outcome.violation, outcome.violation


def _twin(rnd: Random) -> None:
    twin_walk(rnd.getrandbits(32), EVENTS // 3)


def _tree_history(rnd: Random) -> None:
    TreeHistory(rnd.getrandbits(32), pools=rnd.randint(1, 3)).play()


def _session_history(rnd: Random) -> None:
    capped = rnd.random() < 0.5
    SessionHistory(
        rnd.getrandbits(32), rnd.randint(1, 3), capped=capped, killed=rnd.random() < 0.5
    ).play()


def _faults(rnd: Random) -> None:
    outcome = run_case(Case(rnd.getrandbits(32), EVENTS))
    assert not outcome.violation, outcome.violation


WALKS: tuple[Callable[[Random], None], ...] = (
    _plain, _tree, _agents, _member, _views, _hostile, _twin, _tree_history, _session_history,
    _faults,
)  # fmt: skip


def corpus() -> list[bytes]:
    """Return one seed of each walk. The first byte is the walk's number."""
    return [bytes((number, *b"seed" * 2)) for number in range(len(WALKS))]


def walk(data: bytes) -> None:
    """Walk by a seed: the books balance all along."""
    if data:
        WALKS[data[0] % len(WALKS)](Random(data))
