"""Connects arrivals to engines: through the production core, or directly."""

from collections.abc import Sequence
from struct import Struct

from schedsvc import _core as core_module
from schedsvc._core import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    GRANTED,
    REJECTED_UNKNOWN_TENANT,
    CallerError,
    Scheduler,
    progress_all,
    promised_tokens,
)
from schedsvc_lab.sim.requests import NEVER, Requests
from schedsvc_lab.sim.runner import EngineRunner, Report

__all__ = [
    "CoreAdapter",
    "DirectAdapter",
    "SchedulerAdapter",
    "Telemetry",
    "Verdict",
    "outcome_name",
]

# The fields of a lease in a bulk report: its request's handle, its pool's epoch, tokens of input.
_ROW = Struct("=3q")
_NAMES = {
    value: name
    for name, value in vars(core_module).items()
    if isinstance(value, int) and name.startswith(("GRANTED", "REJECTED_", "EVICTED_"))
}


def outcome_name(outcome: int) -> str:
    """Name an outcome as the contract does."""
    return _NAMES.get(outcome, str(outcome))


class Verdict:
    """Holds the verdict on one request: GRANTED in a pool, or why not."""

    __slots__ = ("outcome", "pool", "request")

    def __init__(self, request: int, outcome: int, pool: int) -> None:
        self.request = request
        self.outcome = outcome
        self.pool = pool


class Telemetry:
    """Holds a shim's report on its engine; `preemptions` since the engine's start."""

    __slots__ = ("preemptions", "running", "used_tokens", "waiting")

    def __init__(self, running: int, waiting: int, used_tokens: int, preemptions: int) -> None:
        self.running = running
        self.waiting = waiting
        self.used_tokens = used_tokens
        self.preemptions = preemptions


class SchedulerAdapter:
    """Decides which request goes to which engine, and when. Times are virtual.

    Shims send progress only if it `listens`. `expired` counts leases that were not renewed in time.
    This one reads everything and decides nothing.
    """

    __slots__ = ("expired", "listens")

    def __init__(self, listens: bool) -> None:
        self.listens = listens
        self.expired = 0

    def arrive(self, now_ns: int, index: int) -> None:
        """Take in a request."""

    def progress(self, now_ns: int, report: Report) -> None:
        """Hear how far running requests are."""

    def complete(
        self, now_ns: int, index: int, served: bool = True, cached_tokens: int = 0
    ) -> None:
        """Hear that a request has ended, or that its engine did not take it.

        `cached_tokens` of its prompt came from the prefix cache.
        """

    def telemetry(self, now_ns: int, pool: int, told: Telemetry) -> None:
        """Hear how an engine is."""

    def poll(self, now_ns: int) -> list[Verdict]:
        """Give the verdicts that have fallen."""
        return []

    def next_ns(self) -> int:
        """Return when to poll without another event; NEVER: not."""
        return NEVER

    def reserved_tokens(self, now_ns: int) -> int | None:
        """Return the KV cache promised in all pools; None if the adapter makes no promises."""
        return None

    def digest(self) -> int:
        """Return the digest of all decisions."""
        return 0

    def check(self, now_ns: int, ended: bool) -> None:
        """Verify the books. Raises InvariantError, also if `ended` and something is left."""


class CoreAdapter(SchedulerAdapter):
    """Drives the production core as the server does, with one lease for each running request.

    `flows[c]` is the flow of client c (-1: refused as unknown). A request asks for
    `output_tokens_max`, or for exactly its output if that is 0 or less than its output. `told`
    holds an oracle's estimates of the outputs. A request asks for the class in the trace if the
    core has one of that name, else for the tenant's own. `deadlines[i]` is the time within which
    request i wants its first token (0: none). `prefixes`: the core gets the hashes of prompts,
    whose KV cache engines keep. `sessions`: conversations of the trace are sessions of agents.
    """

    def __init__(
        self,
        core: Scheduler,
        requests: Requests,
        flows: Sequence[int],
        output_tokens_max: int,
        told: Sequence[int] | None = None,
        deadlines: Sequence[int] | None = None,
        *,
        prefixes: bool = False,
        sessions: bool = False,
    ) -> None:
        super().__init__(True)
        # The epochs do not change while it runs.
        self._epochs = [int(pool["epoch"]) for pool in core.stats(0, 0)["pools"]]
        self.core = core
        # Asked at each moment.
        self._core_poll, self._core_next = core.poll, core.next_deadline
        self._requests = requests
        self._prompt_tokens, self._output_tokens = requests.prompt_tokens, requests.output_tokens
        self._contents = requests.contents
        self._flows = flows
        self._output_tokens_max = output_tokens_max
        self._told = told
        self._prefixes = prefixes
        self._deadlines = deadlines
        self._sessions = requests.sessions if sessions else None
        names = (str(row["name"]) for row in core.stats(0, 0)["classes"])
        self._classes = {name: name.encode() for name in names}
        self._leases: dict[int, tuple[int, int, bytes]] = {}  # id, epoch, row
        self._reported: tuple[int, ...] = ()  # requests last sent, and their leases
        self._reported_leases = b""
        self._refused: list[Verdict] = []

    def arrive(self, now_ns: int, index: int) -> None:
        """Ask the core. O(log n)."""
        requests = self._requests
        flow = self._flows[requests.client[index]]
        if flow < 0:
            self._refused.append(Verdict(index, REJECTED_UNKNOWN_TENANT, NEVER))
            return
        try:
            answer = self._admit(now_ns, flow, index, self._class_of(index))
        except CallerError as error:
            if error.field != "request_class":
                raise
            answer = self._admit(now_ns, flow, index, b"")  # as a gate does
        if answer < 0:
            self._refused.append(Verdict(index, -answer, NEVER))

    def _admit(self, now_ns: int, flow: int, index: int, request_class: bytes) -> int:
        return self.core.admit(
            now_ns,
            flow,
            index.to_bytes(8, "little"),
            self._prompt_tokens[index],
            max(self._output_tokens_max, self._output_tokens[index]),
            reports_progress=True,
            tag=index,
            adapter=self._adapter(index),
            told_output=0 if self._told is None else self._told[index],
            deadline_ns=0 if self._deadlines is None else self._deadlines[index],
            request_class=request_class,
            prefix_block_hashes=self._hashes(index),
            session=self._session(index),
        )

    def _adapter(self, index: int) -> bytes:
        contents = self._contents
        name = None if contents is None else contents.adapter(self._requests.place[index])
        return b"" if name is None else name.encode()

    def _session(self, index: int) -> bytes:
        if self._sessions is None:
            return b""
        return self._sessions[self._requests.place[index]].encode()

    def _hashes(self, index: int) -> tuple[int, ...]:
        contents = self._contents
        if contents is None or not self._prefixes:
            return ()
        return contents.hashes(self._requests.place[index], self._prompt_tokens[index])

    def _class_of(self, index: int) -> bytes:
        classes = self._requests.classes
        if classes is None:
            return b""
        return self._classes.get(classes[self._requests.place[index]], b"")

    def progress(self, now_ns: int, report: Report) -> None:
        """Renew the leases and charge the new output. O(log n) for each."""
        if report.requests is not self._reported:
            leases = self._leases
            self._reported_leases = b"".join([leases[index][2] for index in report.requests])
            self._reported = report.requests
        progress_all(self.core, now_ns, self._reported_leases, report.bases, report.ahead)

    def complete(
        self, now_ns: int, index: int, served: bool = True, cached_tokens: int = 0
    ) -> None:
        """End the lease with the exact usage: none if it was not served. O(log n)."""
        lease_id, epoch, _ = self._leases.pop(index)
        outcome, prompt, output = CANCELLED, 0, 0
        if served:
            outcome = COMPLETED
            prompt = self._prompt_tokens[index]
            output = self._output_tokens[index]
        self.core.complete(now_ns, lease_id, epoch, outcome, prompt, cached_tokens, output)

    def telemetry(self, now_ns: int, pool: int, told: Telemetry) -> None:
        """Report it to the core. O(1)."""
        self.core.telemetry(
            now_ns, pool, self._epochs[pool],
            told.running, told.waiting, told.used_tokens, told.preemptions,
        )  # fmt: skip

    def poll(self, now_ns: int) -> list[Verdict]:
        """Let the core decide."""
        decisions = self._core_poll(now_ns)
        if not decisions and not self._refused:
            return []
        verdicts, self._refused = self._refused, []
        for decision in decisions:
            index, outcome = decision.tag, decision.outcome
            if outcome == GRANTED:
                epoch = decision.pool_epoch
                row = _ROW.pack(decision.handle, epoch, self._prompt_tokens[index])
                self._leases[index] = (decision.lease_id, epoch, row)
            elif outcome == EXPIRED:
                self.expired += 1
                continue  # reported too seldom: the engine runs it all the same
            verdicts.append(Verdict(index, outcome, decision.pool))
        return verdicts

    def next_ns(self) -> int:
        """Ask the core for its next deadline."""
        return self._core_next()

    def reserved_tokens(self, now_ns: int) -> int | None:
        """Sum what the ledger has promised. O(pools)."""
        return promised_tokens(self.core)

    def digest(self) -> int:
        """Return the digest of the core's decision log."""
        return self.core.digest()

    def check(self, now_ns: int, ended: bool) -> None:
        """Verify every invariant of the core, and at the end that it holds nothing. O(n)."""
        self.core.check()
        if not ended:
            return
        stats = self.core.stats(now_ns, 0)
        left = {
            f"{pool['name']}.{key}": pool[key]
            for pool in stats["pools"]
            for key in ("promised_tokens", "posted_tokens", "live_leases")
            if pool[key]
        }
        if left or self._leases:
            raise core_module.InvariantError(f"after the run the core still holds {left}")


class DirectAdapter(SchedulerAdapter):
    """Sends every request at once to the engine with the fewest open requests: no scheduler."""

    def __init__(self, runners: Sequence[EngineRunner]) -> None:
        super().__init__(False)
        self._runners = runners
        self._added = [0] * len(runners)
        self._pool_of: dict[int, int] = {}
        self._verdicts: list[Verdict] = []

    def arrive(self, now_ns: int, index: int) -> None:
        """Pick an engine. O(engines)."""
        pool = min(range(len(self._added)), key=self._added.__getitem__)
        self._added[pool] += 1
        self._pool_of[index] = pool
        self._verdicts.append(Verdict(index, GRANTED, pool))

    def complete(
        self, now_ns: int, index: int, served: bool = True, cached_tokens: int = 0
    ) -> None:
        """Forget it."""
        self._added[self._pool_of.pop(index)] -= 1

    def poll(self, now_ns: int) -> list[Verdict]:
        """Let everything in."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def check(self, now_ns: int, ended: bool) -> None:
        """At the end no request or lease is open."""
        if ended and self._pool_of:
            raise core_module.InvariantError(f"{len(self._pool_of)} requests never ended")
