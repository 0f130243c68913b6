"""The store of the simulator answers as a real server does that runs the same functions."""

import gc
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis.exceptions

from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.library import library_source
from schedsvc_lab.faults.cluster.store import ACL, VirtualStore
from tests.cluster.store_server import StoreServer, running_store, store_program
from tests.cluster.timed_store import TimedStore
from tests.seeds import fresh

from .store_calls import Calls, Words

_CALLS = 200


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.slow)])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with running_store(tmp_path / "store", program=store_program(request.param)) as found:
        yield found


def virtual_answer(virtual: VirtualStore, words: Words) -> Any:
    """Return an answer, and for an error the first words of its text."""
    try:
        return virtual.command(words)
    except redis.exceptions.ResponseError as error:
        return reason(str(error))


async def real_answer(real: TimedStore, words: Words) -> Any:
    try:
        return await real.link.command(*words)
    except StoreError as error:
        return reason(str(error).partition("FCALL failed: ")[2])


def reason(text: str) -> str:
    """Return an error's first word if it is one of the server's, or that a script failed."""
    return "WRONGTYPE" if text.startswith("WRONGTYPE") else "failed"


def plant(virtual: VirtualStore, name: str, key: str | bytes, *words: str | bytes) -> None:
    args = [word.encode() if isinstance(word, str) else word for word in (key, *words)]
    virtual.data.command("DEL", args[:1])
    virtual.data.command(name, args)


def read(contents: dict[bytes, tuple[Any, int | None]]) -> dict[bytes, Any]:
    """Read the values that the functions pack, whose fields have any order."""
    return {key: (unpacked(value), due_ms) for key, (value, due_ms) in contents.items()}


def unpacked(value: Any) -> Any:
    try:
        # As a text, in which NaN is NaN.
        return repr(msgpack.unpackb(value, raw=True, object_pairs_hook=sorted))
    except (TypeError, ValueError):  # another kind of key, or another program's
        return value


async def test_each_function_does_as_in_a_real_server(server: StoreServer) -> None:
    """Random histories have the same answers and the same keys in both."""
    real = await TimedStore.on(server)
    kinds: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    try:
        for seed in fresh(50):
            calls, clock = Calls(seed), [1_000_000]
            virtual = VirtualStore(lambda clock=clock: clock[0])
            await real.flush()
            for number in range(_CALLS):
                clock[0] += calls.step_ms()
                await real.set_ms(clock[0])
                words = calls.next()
                if words[2] and calls.rnd.random() < 0.01:
                    alien = calls.alien(words[3 : 3 + words[2]])
                    await real.plant(*alien)
                    plant(virtual, *alien)
                expected = await real_answer(real, words)
                assert virtual_answer(virtual, words) == expected, f"{seed} {number} {words}"
                kinds[words[1]] += 1
                if isinstance(expected, str):
                    errors[expected] += 1
                else:
                    calls.heard(words, expected)
            virtual.data.forget_expired()
            assert read(virtual.data.contents()) == read(await real.contents()), seed
    finally:
        await real.close()
    assert set(kinds) == set(re.findall(r"'(schedsvc_\w+)'", library_source()))
    assert min(kinds.values()) > 20
    assert min(errors["WRONGTYPE"], errors["failed"]) > 20


def test_an_unreferenced_store_is_freed() -> None:
    """Otherwise each seed would keep its store: Python finds no cycle that goes through Lua."""
    store = VirtualStore(lambda: 0)
    assert store.command(("FCALL", "schedsvc_version", 0))
    seen = weakref.ref(store)
    del store
    gc.collect()
    assert seen() is None


def test_a_bug_of_the_simulator_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = VirtualStore(lambda: 0)
    monkeypatch.setattr(store.data, "command", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.command(("FCALL", "schedsvc_probe", 1, "key"))


def test_a_store_without_permission_to_write_answers_what_only_reads() -> None:
    store = VirtualStore(lambda: 0)
    store.refusal = ACL
    look = "FCALL", "schedsvc_term_look", 3, "hold", "terms", "standbys", "main"
    assert store.command((*look, "", 3_000)) == [b"", b"", b"", 0]
    with pytest.raises(redis.exceptions.ResponseError, match="ACL failure in script"):
        store.command((*look, "a", 3_000))
