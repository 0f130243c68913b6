"""Puts core, driver, service, listeners and metrics together, and takes them apart again."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from schedsvc_client.v1.leader_pb2 import Leadership

from schedsvc.config import (
    Config,
    EntryLog,
    ModeOverlay,
    OperatorEntry,
    Tenant,
    in_force,
    needs_restart,
    restored_entries,
)
from schedsvc.driver import WORK_MAX, Broken, Driver, Leading, new_core
from schedsvc.driver.clock import HEARTBEAT_NS, SteadyClock, wall_ms
from schedsvc.records.state import StateWriter, Store, restore
from schedsvc.records.usage import Budgets, Ledger, UsageWriter
from schedsvc.server.cluster import member_of, set_fingerprint
from schedsvc.server.credentials import Callers, known_callers, make_tokens
from schedsvc.server.followers import FollowedRows, Resume
from schedsvc.server.health import Health
from schedsvc.server.listed_tenants import ListedTenants, shown_tenants
from schedsvc.server.listeners import Address, AnyServer, bind, new_server
from schedsvc.server.logs import configure_logs
from schedsvc.server.metered import metrics_of, models_of
from schedsvc.server.operator import OperatorActions
from schedsvc.server.recorded import begin_recording, recording_of
from schedsvc.server.reflection import add_reflection
from schedsvc.server.shared_settings import share_settings
from schedsvc.server.strangers import Strangers
from schedsvc.server.tasks import end_tasks
from schedsvc.server.tenant_keys import TenantKeys
from schedsvc.server.tenants import TenantActions
from schedsvc.service import (
    Authenticator,
    ExplainService,
    FollowService,
    IdentityService,
    Judge,
    Known,
    OperatorService,
    Paces,
    Service,
    TenantCalls,
)
from schedsvc.service.status import Failure, not_leading_failure, unauthenticated_failure

if TYPE_CHECKING:
    from schedsvc.server.metrics_http import MetricsPage

__all__ = ["Server"]

_log = structlog.get_logger("schedsvc.server")

_HEARTBEAT_S = HEARTBEAT_NS / 1e9
_DRAIN_LOOK_S = 0.050
_LIMITED_LOOK_S = 60.0
_FLUSH_S = 1.0
_LOOK_S = 0.005
_STOP_GRACE_S = 1.0
#: For streams to end at a member that leads no more.
_LEAVE_S = 0.05
_STOPPED = "the scheduler stopped; retry later"
#: For the flush, the grace, and the last write of the state.
_STOP_MARGIN_S = 10.0


class Server:
    """Runs one scheduler: a core behind all listeners of a configuration."""

    def __init__(
        self, config: Config, leading: Leading | None = None, resume: Resume | None = None
    ) -> None:
        """Make a server; nothing listens yet. Has to be called in the event loop.

        `leading`: of a member with a role in a set; unless it leads now, the server stands by: it
        restores, saves and records nothing. `resume` changes what the state file holds first.

        Raises RecordingError, StateError or UsageError if that file cannot be used, and
        ClusterError if a package of `cluster` is missing.
        """
        #: The configuration in force; settings that need a restart are those of the start.
        # With the proof that each listener asks for, which a reload does not change.
        self._config = config = in_force(config, config)
        self._clock = SteadyClock()
        self._incarnation = secrets.randbits(63) + 1
        options = _core_options(config, self._incarnation)
        stands_by = leading is not None and not leading.until_ns
        store, log = None if stands_by else _store(config), EntryLog()
        if store is not None and resume is not None:
            resume(store)
        if store is not None:
            options["hash_key"] = store.hash_key
        #: The modes that operators set before a restart.
        self._said, listed = _what_was_said(store, config, log)
        whole = listed.on(config)
        now_ns = self._clock.now_ns()
        self._recording = None if stands_by else recording_of(whole, now_ns, options)
        core = self._recording.core if self._recording else new_core(whole, now_ns, **options)
        if store is not None:
            # Nothing listens before that: each client that connects finds the scheduler restored.
            restore(core, store, self._clock.now_ns())
            if store.set_aside_as:
                self._said = ModeOverlay()
        self.driver = Driver(core, self._clock, self._on_defect, _log_note)
        self.driver.loading.succeeded_ms = wall_ms()
        self.driver.tenant_entries = log
        if leading is not None:
            self._begin_term(leading, stands_by)
        self._keeper: StateWriter | None = None
        if store is not None and config.state is not None:
            self._keeper = StateWriter(self.driver, store, config.state.every_ms)
        self._usage: UsageWriter | None
        self._budgets: Budgets | None
        self._usage, self._budgets = _usage_of(self.driver, None if stands_by else whole)
        self._member = None if stands_by else member_of(self.driver, config, self._incarnation)
        if self._member is not None and self._budgets is not None:
            self._member.escrow.share_budgets(self._budgets)
        self.metrics = metrics_of(self.driver, whole)
        self._health = Health(stands_by=stands_by)
        self._strangers = Strangers(config.limits.connections_max)
        self._handles = OperatorActions(
            self.driver,
            config,
            listed,
            self._health,
            show=lambda now: self.metrics.show(shown_tenants(now), models_of(now)),
            save=self._keeper.hurry if self._keeper else lambda: None,
        )
        saved = self._keeper.saved if self._keeper else _nothing_to_save
        actions = TenantActions(self.driver, self._handles, self.metrics, saved, self._moved)
        self._keys = TenantKeys(self._handles, actions)
        share_settings(self._member, self.driver, config, actions, self._handles)
        self._callers = Callers(self.driver, config)
        self._paces = Paces(self._callers.credentials)
        self._judge = Judge(self.driver)
        self.metrics.counts.throttled = self._paces.counts
        self._limited = 0  # leases of which a report was limited, at the last look
        self._have_nothing_open()

    def _have_nothing_open(self) -> None:
        self._services: list[Service] = []
        #: The services for members that follow this one while it leads.
        self.follow_services: list[FollowService] = []
        self.on_promise: Callable[[str, int], None] = lambda member, asked_ns: None
        #: Names the keys of files that were read at the start only, and have changed.
        self.outdated: Callable[[], list[str]] = list
        #: Puts the ports that a server before this one got in the place of 0.
        self.placed: Callable[[Config], Config] = lambda config: config
        self._grpc: list[AnyServer] = []
        self._addresses: list[Address] = []
        self._page: MetricsPage | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Addresses as a client's targets, in the order of the configuration, once started.
        self.targets: list[str] = []
        #: Where Prometheus may scrape, once started.
        self.metrics_url: str | None = None

    def _begin_term(self, leading: Leading, stands_by: bool) -> None:
        """Let the core decide under a term, or not at all."""
        self.driver.leading, self.driver.is_under_term = leading, not stands_by
        if not stands_by:
            stated = Leadership(term=leading.term, leader=leading.leader).SerializeToString()
            self.driver.leadership = stated
            self.driver.change(lambda core, now_ns: core.set_leadership(now_ns, stated))
            self.driver.begin_term(leading)

    async def step_down(self) -> None:
        """End what waits and all streams, because this member leads no more; a quarter second."""
        self.driver.end_term()
        error = self.driver.not_leading()
        self._end_streams(not_leading_failure(str(error), error.target))
        await self._wait(lambda: not any(s.streams for s in self._services), _LEAVE_S)

    async def start(self) -> None:
        """Listen on every address, and begin to record.

        Raises ListenError and RecordingError, and then listens on none.
        """
        try:
            await self._start()
        except BaseException:
            # Only a server that runs gives its addresses back when it stops.
            for server in self._grpc:
                await server.start()
            await self.stop(None)
            raise

    async def _start(self) -> None:
        await self._handles.resume(self._said)
        config = self.placed(self._config)
        for listener in config.listeners:
            kind, named = config.auth_kind(listener), listener.unix or listener.tcp or ""
            authenticator = Authenticator(
                self._callers.credentials, kind, named, self._strangers.prove
            )
            server = self._new_grpc_server(authenticator, config.may_operate(listener))
            self._grpc.append(server)
            address = bind(server, config, listener)
            self._addresses.append(address)
            self._strangers.watch(address.target)
            self.targets.append(target := address.target)
            _log.info("listening", target=target, tls=listener.tls is not None, auth=kind)
        if config.metrics is not None:
            # Imported here: a scheduler without metrics starts without an HTTP library.
            from schedsvc.server.metrics_http import MetricsPage

            self._page = MetricsPage(self.driver, self.metrics, self._incarnation, self._judge)
            self.metrics_url = await self._page.start(config.metrics.listen, config.metrics.hosts)
            _log.info("listening", metrics=self.metrics_url)
        if self._recording is not None:
            # All addresses and files are held now: until here an earlier recording was untouched.
            begin_recording(self._recording)
        if self._member is not None:
            await self._member.begin()
        # Last, so that no call is taken before everything else has started.
        for server in self._grpc:
            await server.start()
        if self._keeper is not None:
            self._keep(self._keeper.run())
        if self._usage is not None and self._budgets is not None:
            self._keep(self._usage.run())
            self._keep(self._budgets.run())
        if self._member is not None:
            self._keep(self._member.run())
        self._keep(self._beat())
        self._keep(self._judge.run())
        self._keep(self._strangers.run())

    def _new_grpc_server(self, authenticator: Authenticator, operate: bool) -> AnyServer:
        def on_failure(method: str, code: grpc.StatusCode) -> None:
            self.metrics.count_failure(method, code.name)

        service = Service(
            self.driver,
            authenticator=authenticator,
            incarnation=self._incarnation,
            write_stall_s=self._config.limits.write_stall_ms / 1_000,
            on_failure=on_failure,
            paces=self._paces,
            judge=self._judge,
        )
        operator = OperatorService(
            self.driver, self._handles, TenantCalls(self._keys.tenants, self._keys),
            authenticator=authenticator, open_here=operate, on_failure=on_failure,
        )  # fmt: skip
        self._services.append(service)
        server = new_server(self._config)
        explain = ExplainService(
            self.driver, operator.may_operate, authenticator=authenticator, on_failure=on_failure
        )
        identity = IdentityService(
            self.driver, self._keys.who_is, self._paces,
            authenticator=authenticator, on_failure=on_failure,
        )  # fmt: skip
        handlers = tuple(each.handler() for each in (service, operator, explain, identity))
        server.add_generic_rpc_handlers(handlers)
        if self.driver.is_under_term and self._keeper is not None:
            follow = FollowService(
                self.driver, FollowedRows(self._keeper), set_fingerprint(self._config),
                self.on_promise, authenticator=authenticator,
                write_stall_s=self._config.limits.write_stall_ms / 1_000, on_failure=on_failure,
            )  # fmt: skip
            self.follow_services.append(follow)
            server.add_generic_rpc_handlers((follow.handler(),))
        self._health.add_to(server)
        add_reflection(server, authenticator)
        return server

    def _moved(self, name: str, tenant: Tenant | None) -> None:
        if self._usage is not None and self._budgets is not None:
            self._usage.move(name, tenant)
            self._budgets.move(name, tenant)

    def reconfigure(self, config: Config) -> None:
        """Put another valid file in force, as far as a running server can.

        Tokens and TLS files are read again, also if the file is as it was. Raises CallerError,
        Broken, ValueError or OSError, and then nothing has changed.
        """
        before = self._config
        make_tokens(config)
        known = known_callers(in_force(config, before))
        secure = [a.certificates for a in self._addresses if a.certificates is not None]
        files, outdated = [certificates.read() for certificates in secure], self.outdated()
        is_same = in_force(config, before) == before
        if is_same and not self._callers.differ(known, before):
            _log.info("config_unchanged")
        elif is_same:
            self._replace_callers(known)
        else:
            self._config, kept = self._handles.reconfigured(config)
            if self._usage is not None and self._budgets is not None:
                whole = self._handles.listed.on(self._config)
                self._usage.configure(whole)
                self._budgets.configure(whole)
            if self._member is not None:
                self._member.configured(self._config)
            if self._config.log != before.log:
                configure_logs(self._config.log.format, self._config.log.level)
            _log.info("config_reloaded", tenants=len(config.tenants), mode=config.mode)
            for pool, reason in kept:
                _log.warning("pool_unchanged", pool=pool, reason=reason)
            self._replace_callers(known)
        if sum(c.offer(held) for c, held in zip(secure, files, strict=True)):
            _log.info("certificates_reloaded", effect="for new connections")
        waiting = [*needs_restart(config, self._config), *outdated]
        self.driver.loading.waiting = tuple(waiting)
        if waiting:
            _log.warning("config_needs_restart", keys=waiting, effect="these stay as they were")

    def _replace_callers(self, known: list[Known]) -> None:
        if not self._callers.differ(known, self._config):
            return
        ended = self._callers.replace(known, self._config)
        _log.info("callers_reloaded", principals=len(known))
        failure = unauthenticated_failure("this caller's token or certificate was withdrawn")
        for service in self._services:
            for stream in [s for s in service.streams if s.principal in ended]:
                stream.end(failure)
        for follow in self.follow_services:
            follow.withdraw(ended)

    async def drain(self) -> None:
        """Refuse what is new, serve what is queued and running, then evict; close the streams.

        Takes at most `limits.drain_ms` and about a second.
        """
        began_ns = self._clock.now_ns()
        self._handles.stopping = True
        _log.info("draining", drain_ms=self._config.limits.drain_ms)
        await self._health.stop()
        evicted = 0
        try:
            self.driver.drain()
            await self._wait(self._is_idle, self._config.limits.drain_ms / 1_000, _DRAIN_LOOK_S)
            evicted = self.driver.evict_queued()
            # The last decisions reach their callers.
            await asyncio.sleep(0)
            await self._wait(self._is_flushed, _FLUSH_S)
        except Broken:
            _log.error("drain_cut_short", reason=self.driver.broken)
        self._end_streams(Failure(grpc.StatusCode.UNAVAILABLE, _STOPPED))
        waited_ms = (self._clock.now_ns() - began_ns) // 1_000_000
        _log.info("drained", evicted=evicted, waited_ms=waited_ms)

    @property
    def stop_s_max(self) -> float:
        """Return the seconds that `drain()` and `stop()` take at most together, with a margin."""
        return self._config.limits.drain_ms / 1_000 + _STOP_MARGIN_S

    async def stop(self, grace_s: float | None = _STOP_GRACE_S) -> None:
        """Stop listening; calls in flight get `grace_s` (None: nothing). Idempotent."""
        await end_tasks(self._tasks)
        for address in self._addresses:
            address.release()
        servers, self._grpc = self._grpc, []
        await asyncio.gather(*(server.stop(grace_s) for server in servers))
        if self._page is not None:
            await self._page.stop()
            self._page = None
        if self._keeper is not None:
            await self._keeper.close()
        if self._usage is not None:
            await self._usage.close()
        self.driver.close()
        if self._recording is not None:
            await asyncio.to_thread(self._recording.close)

    async def _wait(self, done: Callable[[], bool], most_s: float, look_s: float = _LOOK_S) -> None:
        """Wait until `done()` is true, or that time has passed by the server's clock."""
        end_ns = self._clock.now_ns() + round(most_s * 1e9)
        left_s = most_s
        while left_s > 0 and not done():
            await asyncio.sleep(min(look_s, left_s))
            left_s = (end_ns - self._clock.now_ns()) / 1e9

    def _is_idle(self) -> bool:
        totals = self.driver.stats(0, pools=False)["totals"]
        return not totals["queued"] and not totals["live_leases"]

    def _is_flushed(self) -> bool:
        streams = (stream for service in self._services for stream in service.streams)
        return not any(stream.writing for stream in streams)

    def _end_streams(self, failure: Failure) -> None:
        for service in self._services:
            for stream in list(service.streams):
                stream.end(failure)

    async def _beat(self) -> None:
        """Keep the clock awake, and measure how late the event loop is."""
        loop = asyncio.get_running_loop()
        looked = loop.time()
        while True:
            due = loop.time() + _HEARTBEAT_S
            await asyncio.sleep(_HEARTBEAT_S)
            self._clock.now_ns()
            self.metrics.counts.add_lag(loop.time() - due)
            with suppress(Broken):
                self._keys.expire()
            if loop.time() - looked >= _LIMITED_LOOK_S:
                looked = loop.time()
                with suppress(Broken):
                    self.log_limited()

    def log_limited(self) -> None:
        """Log how many leases had a report limited since the last look, if any. O(pools)."""
        total = self.driver.stats(0, pools=False)["totals"]["reports_limited"]
        if total > self._limited:
            effect = "the scheduler cut the excess; see docs/operate/operations.md"
            _log.warning("reports_limited", leases=total - self._limited, effect=effect)
        self._limited = total

    def _on_defect(self, error: Exception, state: str) -> None:
        if not state:
            _log.error("defect", exc_info=error)
            return
        _log.critical("invariant_broken", reason=self.driver.broken, state=state, exc_info=error)
        self._keep(self._health.fail())

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _log_note(event: str, pool: bytes, count: int, reason: str) -> None:
    what = {"leases": count} if event == "leases_voided" else {}
    # As of a peer, so that no pool fills the log.
    name = pool.decode()
    _log.warning(event, peer=f"pool {name}", pool=name, **what, reason=reason)


def _core_options(config: Config, incarnation: int) -> dict[str, Any]:
    """Return the arguments of the core that the configuration does not hold."""
    return {
        "hash_key": secrets.token_bytes(16),
        # Makes lease ids random. A recording holds it, because its replay needs it.
        "lease_seed": secrets.token_hex(16),
        "incarnation": incarnation,
        "work_max": WORK_MAX,
        "message_bytes_max": config.limits.message_max_bytes,
    }


def _usage_of(
    driver: Driver, config: Config | None
) -> tuple[UsageWriter, Budgets] | tuple[None, None]:
    """Open the usage ledger, if the configuration has one. Raises UsageError."""
    if config is None or config.usage is None:
        return None, None
    ledger = Ledger(config.resolve(config.usage.path), config.usage.keep_days)
    writer, budgets = UsageWriter(driver, ledger, config), Budgets(driver, ledger, config)
    writer.on_known = budgets.refund
    return writer, budgets


def _store(config: Config) -> Store | None:
    """Open the state file of a configuration, if it has one. Raises StateError."""
    return None if config.state is None else Store(config.resolve(config.state.file))


def _what_was_said(
    store: Store | None, config: Config, log: EntryLog
) -> tuple[ModeOverlay, ListedTenants]:
    """Read what operators said of modes and tenants; a file in which it is wrong is set aside."""
    said, entries = ModeOverlay(), dict[str, OperatorEntry]()
    if store is not None:
        try:
            said, entries = ModeOverlay.restored(store.modes), restored_entries(store.entries)
        except ValueError as error:
            store.set_aside(str(error))
    return said, ListedTenants.resumed(config, entries, log)


async def _nothing_to_save() -> None: ...
