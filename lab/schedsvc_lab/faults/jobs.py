"""Holds the clients' requests, and the state of each on its client's side."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.options import Options

_SEASON, _ALONE = 130, 40
"""Requests in a season, and how many of its first ones come from one tenant alone."""

_DOMAIN_POOL = 2

_ODD, _HASH_MAX = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Job:
    """Follows one request of a client, from its arrival to its end."""

    __slots__ = (
        "began_ns", "epoch", "first_ns", "granted_ns", "has_left", "input_tokens", "is_over",
        "lease_id", "output_tokens", "produced", "request", "steps_left", "tag", "tries",
    )  # fmt: skip

    def __init__(
        self, request: pb.AdmitRequest, input_tokens: int, output_tokens: int, steps: int
    ) -> None:
        self.request = request
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens  # the output that it will produce
        self.steps_left = steps  # until it has
        self.produced = 0
        self.tag = 0
        self.lease_id = 0  # once it runs
        # When it was granted, its prompt began to be computed, and it has its first token.
        self.granted_ns = self.began_ns = self.first_ns = 0
        self.epoch = 0
        self.tries = 0
        self.has_left = False
        self.is_over = False


class Sets(NamedTuple):
    """Holds the pools of which requests name several, and how many requests do."""

    names: list[str]
    permille: int


def draw_sets(options: Options) -> Sets:
    """Draw from a stream of its own, so that other draws stay; in half of the runs none do."""
    rnd = Random(options.seed ^ 0x5E7)  # noqa: S311 - no secret: one seed is one run
    permille = rnd.choice((0, 0, 150, 600))
    if options.core.get("fairness_domain") == _DOMAIN_POOL:
        permille = 0
    alone = options.quotas.model_pool if options.quotas else ""
    names = [pool.name for pool in options.pools if pool.name != alone]
    return Sets(names, permille) if permille and len(names) > 1 else Sets([], 0)


class JobMaker:
    """Draws requests."""

    def __init__(self, events: EventQueue, options: Options, prefix: str = "r") -> None:
        self._prefix = prefix
        self._events = events
        self._options = options
        self._tenants = list(options.tenants)
        self._adapters = None if options.adapters is None else list(options.adapters)
        self._classes = None
        if options.classes is not None:
            self._classes = [c.name for c in options.classes.known.values() if not c.exempt]
        self._made = 0
        self._sets = draw_sets(options)
        self._set_draws = Random(options.seed ^ 0x5E75)  # noqa: S311 - no secret

    @property
    def made(self) -> int:
        """Return how many ids it has given out."""
        return self._made

    def next_id(self) -> str:
        """Return an id that no request had."""
        self._made += 1
        return f"{self._prefix}{self._made}"

    def job(self, pool: str = "", tenant: str | None = None) -> Job:
        """Draw a request; half of them for any pool."""
        options, random = self._options, self._events.rnd.random
        if tenant is None:
            tenant = self._tenants[self._whose(random())]
            if options.fair and len(options.pools) > 1:
                tenant = self._at_home(tenant, pool)
        n = 1 if random() < 0.9 else 2
        prompts = [1 + int(random() * options.prompt_max)]
        if random() < 0.05:
            prompts.append(1 + int(random() * options.prompt_max))
        most = 1 + int(random() * options.output_max)
        if options.alike:
            most = 1 + options.output_max // (8 + ord(tenant[0]) % 4)  # so short that many end
        draw = random()
        wanted = options.deadlines_permille and random() * 1_000 < options.deadlines_permille
        # Set field by field: it costs less than arguments, and a default costs nothing.
        request = pb.AdmitRequest()
        request.request_id = self.next_id()
        request.tenant = tenant
        request.input_tokens.extend(prompts)
        request.n = n
        request.max_output_tokens = most
        if random() * 1_000 < options.reports_permille:
            request.reports_progress = True
        if draw < 0.5 and pool:
            request.pools.append(pool)
        if self._sets.permille:
            self._name_set(request)
        if draw < 0.05:
            request.queue_ttl_ms = 500
        if wanted:
            request.deadline_ms = 1 + int(random() * random() * 3_000)
        usual, adapters = self._classes, self._adapters
        if usual is not None and random() < 0.5:
            request.request_class = usual[int(random() * len(usual))]
        if adapters is not None and random() < 0.6:
            request.adapter = adapters[int(random() * len(adapters))]
        if options.prefixes and random() < 0.7:
            request.prefix_block_hashes.extend(self._hashes(prompts[0]))
        sessions = options.sessions
        if sessions is not None and random() * 1_000 < sessions.permille:
            request.session = f"s{int(random() * random() * sessions.names)}"
        used = most if options.alike else 1 + int(random() * random() * most)
        return Job(request, sum(prompts), used * n * len(prompts), 1 + int(random() * 3))

    def _name_set(self, request: pb.AdmitRequest) -> None:
        """Let a request run in several pools, at times by a name more that no pool has."""
        rnd, names = self._set_draws, self._sets.names
        if rnd.random() * 1_000 >= self._sets.permille:
            return
        del request.pools[:]
        request.pools.extend(rnd.sample(names, 2 + int(rnd.random() * (len(names) - 1))))
        if rnd.random() < 0.1:
            request.pools[rnd.randrange(len(request.pools))] = "nowhere"

    def _hashes(self, prompt_tokens: int) -> list[int]:
        """Draw what a prompt begins with: like others, for a part; rarely more than it can hold."""
        random = self._events.rnd.random
        family, count = 1 + int(random() * self._options.prefixes), prompt_tokens // 16
        if random() < 0.03:
            count += int(random() * 600)
        alike = int(random() * (count + 1))
        return [
            (family if at < alike else self._made << 8) * _ODD + at & _HASH_MAX
            for at in range(count)
        ]

    def _whose(self, draw: float) -> int:
        """Draw a tenant: the first ask most, or they come and go."""
        count = len(self._tenants)
        if not self._options.fair:
            return int(draw * draw * count)
        season, at = divmod(self._made, _SEASON)
        return season % count if at < _ALONE else int(draw * count)

    def _at_home(self, tenant: str, pool: str) -> str:
        """Return a tenant that asks for this pool in this season: it, or the next.

        Each moves from pool to pool, so service elsewhere matters when it returns.
        """
        names = [p.name for p in self._options.pools]
        if pool not in names:
            return tenant
        season, first = self._made // _SEASON, self._tenants.index(tenant)
        for k in range(len(self._tenants)):
            number = (first + k) % len(self._tenants)
            if (number * 2 + season * (number + 1)) % (len(names) + 1) in (names.index(pool), 0):
                return self._tenants[number]
        return tenant

    def conflict(self, job: Job) -> pb.AdmitRequest:
        """Return another request under the id of this one."""
        other = pb.AdmitRequest()
        other.CopyFrom(job.request)
        other.max_output_tokens += 1
        return other


def totals(job: Job) -> tuple[int, int, int]:
    """Return what the job has used so far."""
    return job.input_tokens, 0, job.produced
