"""Tests terms in a real store: taken, renewed, handed over, and never by a forged row."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.errors import StoreRefusedError
from schedsvc.cluster.joining import Identity
from schedsvc.cluster.library import term_keys_of
from schedsvc.cluster.signing import seal_row
from schedsvc.cluster.store import Address, StoreConnection, open_checked
from schedsvc.cluster.term_file import TermFile
from schedsvc.cluster.terms import JUMP_MAX, TERM_MS, Term, Terms, term_end_ns
from schedsvc.driver.clock import boot_ns

from .store_server import ADMIN_PASSWORD, StoreServer

SECRET = b"s" * 32
HOLD, TERMS, _ = term_keys_of("prod", "main")


def terms_of(
    member: str,
    pool_set: str = "main",
    secret: bytes = SECRET,
    known: int = 0,
    led: tuple[int, str] = (0, ""),
) -> Terms:
    who = Identity("prod", member, ord(member))
    return Terms(who, pool_set, f"{member}.example:7600", secret, known, led)


@pytest.fixture
async def link(store: StoreServer) -> AsyncIterator[StoreConnection]:
    admin = Address("127.0.0.1", store.port, None, ADMIN_PASSWORD)
    assert (await init_store(admin, "prod", "schedsvc", "secret")).keeps_user
    connection = await open_checked(Address("127.0.0.1", store.port, "schedsvc", "secret"))
    yield connection
    await connection.close()


async def led(terms: Terms, link: StoreConnection) -> Term:
    """Take the next term, as a member does if no other one leads."""
    assert await terms.look(link, may_lead=True) is None
    taken = await terms.take(link)
    assert taken is not None
    return taken[0]


async def test_a_term_has_one_leader(link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    assert await a.look(link, may_lead=True) is None
    assert await b.look(link, may_lead=True) is None
    began_ns = boot_ns()
    taken = await a.take(link)
    assert taken is not None
    assert taken[0] == Term(1, "a/0000000000000061", "a.example:7600")
    # The member counts the term from before its call, so it ends earlier there than in the store.
    assert began_ns < taken[1] - TERM_MS * 980_000 < boot_ns()
    assert await b.take(link) is None
    assert await b.look(link, may_lead=True) == taken[0]


def test_a_term_is_counted_shorter_than_it_lasts() -> None:
    assert term_end_ns(0) == 1_960_000_000


async def test_a_released_term_is_taken_at_once(link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    await a.release(link)
    assert (await led(b, link)).number == 2
    await a.release(link)  # its term is over: that of b stays
    found = await a.look(link, may_lead=False)
    assert found is not None
    assert found.leader.startswith("b/")
    lost = await a.renew(link)
    assert isinstance(lost, Term)
    assert lost == found


async def test_a_renewal_after_the_release_renews_nothing(link: StoreConnection) -> None:
    """The call is on its way when the leader hands its term over on another connection."""
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    assert await b.look(link, may_lead=True) is not None
    await a.release(link)
    assert isinstance(await a.renew(link), Term)
    assert (await led(b, link)).number == 2
    await b.release(link)
    assert (await led(a, link)).number == 3
    assert not isinstance(await a.renew(link), Term)


async def test_a_renewal_names_the_standbys(link: StoreConnection) -> None:
    a, b, c = terms_of("a"), terms_of("b"), terms_of("c")
    await led(a, link)
    await b.look(link, may_lead=True)
    await c.look(link, may_lead=False)
    renewed = await a.renew(link)
    assert not isinstance(renewed, Term)
    assert renewed[1] == ("b",)


async def test_one_counter_serves_all_sets(link: StoreConnection) -> None:
    a, b = terms_of("a", "main"), terms_of("b", "other")
    assert (await led(a, link)).number == 1
    assert (await led(b, link)).number == 2
    assert not isinstance(await a.renew(link), Term)
    assert not isinstance(await b.renew(link), Term)


async def test_a_leader_goes_on_while_other_sets_begin_terms(link: StoreConnection) -> None:
    """The highest term of the cluster is that of another set, and a standby knows so."""
    a, b = terms_of("a"), terms_of("b")
    first = await led(a, link)
    assert await b.look(link, may_lead=True) == first
    await led(terms_of("c", "other"), link)
    assert [await b.look(link, may_lead=True) for _ in range(2)] == [first] * 2
    assert not isinstance(await a.renew(link), Term)
    assert (a.forged, b.forged) == (0, 0)
    assert b.led == (1, first.leader)
    assert b.follow(1, first.leader)
    await a.release(link)
    assert (await led(b, link)).number == 3


async def test_a_leader_hears_of_a_term_between_others(link: StoreConnection) -> None:
    """Its own set has a later term, below the highest term that it knows in the cluster."""
    a, b, c = terms_of("a"), terms_of("b"), terms_of("c", "other")
    await led(a, link)
    await led(c, link)
    assert not isinstance(await a.renew(link), Term)
    assert a.highest == 2
    await a.release(link)
    later = await led(b, link)
    await c.release(link)
    assert (await led(terms_of("d", "other"), link)).number == 4
    assert a.hint(3)  # a client has heard it
    a.highest = 4
    assert a.hint(3)
    assert await a.renew(link) == later


async def test_many_terms_of_other_sets_are_no_jump(
    store: StoreServer, link: StoreConnection
) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    for number in (JUMP_MAX, 2 * JUMP_MAX):
        row = seal_row(SECRET, b"terms", number, b"").decode()
        store.ask("HSET", TERMS, "counter", row)
        assert not isinstance(await a.renew(link), Term)
        await b.look(link, may_lead=True)
    await a.release(link)
    later = await led(b, link)
    assert later.number == 2 * JUMP_MAX + 1
    assert await a.renew(link) == later
    # A leader goes on after a real jump.
    far = seal_row(SECRET, b"terms", 9 * JUMP_MAX, b"").decode()
    store.ask("HSET", TERMS, "counter", far)
    assert not isinstance(await b.renew(link), Term)
    assert b.highest == later.number


async def test_a_lost_term_is_written_again(store: StoreServer, link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    assert await b.look(link, may_lead=True) is not None
    store.ask("FLUSHALL")
    assert await b.look(link, may_lead=True) is None
    assert b.lost_data
    assert not isinstance(await a.renew(link), Term)
    found = await b.look(link, may_lead=True)
    assert found is not None
    assert found.number == 1
    assert not b.lost_data


async def test_a_leader_asks_whether_its_term_is_lost(
    store: StoreServer, link: StoreConnection
) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    assert await a.is_known(link)
    await a.release(link)
    await led(b, link)
    assert await a.is_known(link)  # a renewal would name the other leader
    store.ask("FLUSHALL")
    assert not await a.is_known(link)


async def test_no_term_repeats_after_lost_data(store: StoreServer, link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b", known=41)
    await led(a, link)
    store.ask("FLUSHALL")
    assert (await led(b, link)).number == 42
    lost = await a.renew(link)
    assert isinstance(lost, Term)
    assert lost.number == 42


@pytest.mark.parametrize("row", ["a/61 a.example:1", seal_row(b"other" * 8, b"term:main", 9, b"")])
async def test_a_forged_term_creates_no_right(
    store: StoreServer, link: StoreConnection, row: str | bytes
) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    text = row if isinstance(row, str) else row.decode()
    store.ask("SET", HOLD, text)
    assert not isinstance(await a.renew(link), Term)  # it still leads, and replaces the row
    found = await b.look(link, may_lead=True)
    assert found is not None
    assert found.leader.startswith("a/")
    store.ask("SET", HOLD, text)
    assert await b.look(link, may_lead=True) is None
    assert (a.forged, b.forged) == (1, 1)


async def test_an_old_term_creates_no_right(store: StoreServer, link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    old, _ = a._mine
    await a.release(link)
    await led(b, link)
    store.ask("SET", HOLD, old.decode())
    assert not isinstance(await b.renew(link), Term)
    assert b.forged == 1


async def test_a_jump_of_terms_is_refused(store: StoreServer, link: StoreConnection) -> None:
    a = terms_of("a", known=5)
    far = 5 + JUMP_MAX + 1
    store.ask("HSET", TERMS, "counter", seal_row(SECRET, b"terms", far, b"").decode())
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(StoreRefusedError, match=r"states term 1006.*known term is 5"):
                await a.look(link, may_lead=True)
        assert not a.follow(far, "b/1")
    assert [log["event"] for log in logs] == ["cluster_term_jump"]
    assert a.highest == 5


def test_highest_term_outlives_the_process(tmp_path: Path) -> None:
    file = TermFile(tmp_path / "state.db", "main")
    assert (file.number, file.led) == (0, (0, ""))
    for number, led, kept in (
        (6, (6, "c/1"), (6, (6, "c/1"))),
        (7, (6, "c/1"), (7, (6, "c/1"))),  # of another set
        (7, (7, "a/61"), (7, (7, "a/61"))),
        (7, (7, "b/62"), (7, (7, "a/61"))),  # the member that had it first
        (5, (5, "b/62"), (7, (7, "a/61"))),
        (9, (5, "b/62"), (9, (7, "a/61"))),
    ):
        file.keep(number, led)
        found = TermFile(tmp_path / "state.db", "main")
        assert (found.number, found.led) == (file.number, file.led) == kept
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["state.db.term", "state.db.term.copy"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_member_of_another_set_keeps_the_number_alone(tmp_path: Path) -> None:
    TermFile(tmp_path / "state.db", "main").keep(9, (7, "a/61"))
    file = TermFile(tmp_path / "state.db", "other")
    assert (file.number, file.led) == (9, (0, ""))


@pytest.mark.parametrize(
    "text",
    ["", "seven", "-1", "7\n8", "7 ", "7 a/1", "7 a/1 b", "7 a/1\nb", "7 8 a/1 main", str(1 << 63)],
)
def test_damaged_term_file_is_loud_and_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.db.term").write_text(text)
    with capture_logs() as logs:
        file = TermFile(tmp_path / "state.db", "main")
    assert [entry["event"] for entry in logs] == ["term_file_unreadable"]
    assert file.number == 0
    file.keep(3)
    assert TermFile(tmp_path / "state.db", "main").number == 3


TERM_FILE_ATTACKS: list[Callable[[Path], object]] = [
    Path.unlink,
    lambda path: os.truncate(path, 0),
    lambda path: path.rename(path.with_name("elsewhere")),
    lambda path: path.write_text("1\n"),
]


@pytest.mark.parametrize("attack", TERM_FILE_ATTACKS)
@pytest.mark.parametrize("name", ["state.db.term", "state.db.term.copy"])
def test_term_file_that_is_taken_is_written_again(
    tmp_path: Path, attack: Callable[[Path], object], name: str
) -> None:
    known = 9, (7, "a/61")
    file = TermFile(tmp_path / "state.db", "main")
    file.keep(*known)
    assert not file.lacks(*known)
    attack(tmp_path / name)
    # As the next life of a member that was killed at once.
    found = TermFile(tmp_path / "state.db", "main")
    assert (found.number, found.led) == known
    assert found.lacks(*known)
    assert file.lacks(*known)
    with capture_logs() as logs:
        file.keep(*known)
    assert [entry["event"] for entry in logs] == ["term_file_lost"]
    assert not file.lacks(*known)
    texts = {path.read_text() for path in tmp_path.glob("state.db.term*")}
    assert texts == {"9 7 a/61 main\n"}


def test_term_that_cannot_be_kept_is_logged(tmp_path: Path) -> None:
    file = TermFile(tmp_path / "gone" / "state.db", "main")
    with capture_logs() as logs:
        file.keep(3, (3, "a/61"))
    assert [entry["event"] for entry in logs] == ["term_not_kept"]
    assert file.number == 0


async def test_a_reported_term_is_a_hint(link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    assert a.hint(100)
    assert not isinstance(await a.renew(link), Term)  # no client deposes it
    assert not a.hint(1 << 60)
    await b.look(link, may_lead=True)
    assert b.hint(100)
    await a.release(link)
    assert (await led(b, link)).number == 101


async def test_a_term_expires_in_the_store(link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    async with asyncio.timeout(60):
        while await b.look(link, may_lead=True) is not None:
            pass
    assert (await led(b, link)).number == 2


async def test_a_term_that_a_store_gave_twice_is_over(
    store: StoreServer, link: StoreConnection
) -> None:
    """The store loses the last second, and with it the term that a member has just taken."""
    a, b = terms_of("a"), terms_of("b")
    first = await led(a, link)
    store.ask("DEL", HOLD, TERMS)
    again = await led(b, link)
    assert again.number == first.number
    assert await a.renew(link) == again  # it leads no more
    assert await a.look(link, may_lead=True) is None  # and believes no other leader of its term
    taken = await a.take(link)
    assert taken is not None
    assert taken[0].number == 2
    assert await b.renew(link) == taken[0]
    assert await b.look(link, may_lead=True) == taken[0]


async def test_a_member_that_is_new_repeats_no_lost_term(
    store: StoreServer, link: StoreConnection
) -> None:
    """The store loses its last second, and in it the term that its leader then writes again."""
    a, b, late = terms_of("a"), terms_of("b"), terms_of("c")
    await led(a, link)
    await a.release(link)
    kept = await link.command("HGETALL", TERMS)
    second = await led(b, link)
    store.ask("DEL", HOLD, TERMS)
    await link.command("HSET", TERMS, *kept)
    assert not isinstance(await b.renew(link), Term)
    await b.release(link)
    assert (await led(late, link)).number == second.number + 1


async def test_a_former_leader_knows_its_term_after_a_restart(
    store: StoreServer, link: StoreConnection
) -> None:
    """The store lost its term, gave it again, and the leader had been killed before."""
    first = await led(terms_of("a"), link)
    store.ask("DEL", HOLD, TERMS)
    b = terms_of("b")
    await led(b, link)
    a = terms_of("a", known=first.number, led=(first.number, first.leader))
    assert await a.look(link, may_lead=True) is None
    assert not a.follow(first.number, b._leader)
    taken = await a.take(link)
    assert taken is not None
    assert taken[0].number == first.number + 1
    assert await b.renew(link) == taken[0]


async def test_a_member_that_the_store_forgot_knows_of_the_loss(
    store: StoreServer, link: StoreConnection
) -> None:
    """The store loses a term that this member has not seen, so no counter falls for it."""
    b = terms_of("b")
    for _ in range(2):
        assert await b.look(link, may_lead=True) is None
        assert not b.lost_data
    store.ask("FLUSHALL")
    assert await b.look(link, may_lead=True) is None
    assert b.lost_data
    await led(b, link)
    assert not b.lost_data
    await b.release(link)
    assert await b.look(link, may_lead=True) is None  # the leader itself is not counted
    assert not b.lost_data


async def test_a_member_that_was_away_cannot_rule_out_a_loss(
    monkeypatch: pytest.MonkeyPatch, store: StoreServer, link: StoreConnection
) -> None:
    """After the loss another set begins a term of the same number, so the counter looks whole."""
    monkeypatch.setattr("schedsvc.cluster.terms._STANDBY_MS", 0)
    a, b = terms_of("a"), terms_of("b")
    assert await b.look(link, may_lead=True) is None
    assert (await led(a, link)).number == 1
    store.ask("FLUSHALL")
    assert (await led(terms_of("c", "other"), link)).number == 1
    for away in (a, b):
        assert await away.look(link, may_lead=True) is None
        assert away.lost_data
        assert await away.look(link, may_lead=True) is None
        assert not away.lost_data


async def test_leader_is_known_from_the_last_row_too(link: StoreConnection) -> None:
    a, b = terms_of("a"), terms_of("b")
    term = await led(a, link)
    await a.release(link)
    assert await b.look(link, may_lead=True) is None
    assert (b.highest, b.led) == (1, (1, term.leader))
    await led(terms_of("c", "other"), link)
    assert await b.look(link, may_lead=True) is None
    assert (b.highest, b.led) == (2, (1, term.leader))


async def test_a_term_ends_also_if_the_clock_was_set_back(
    store: StoreServer, link: StoreConnection
) -> None:
    a, b = terms_of("a"), terms_of("b")
    await led(a, link)
    # As in a store whose clock was set back by an hour after the last renewal.
    assert store.ask("PEXPIRE", HOLD, "3600000") == b":1\r\n"
    assert await b.look(link, may_lead=True) is not None
    left_ms = int(store.ask("PTTL", HOLD)[1:])
    assert 0 < left_ms <= TERM_MS
