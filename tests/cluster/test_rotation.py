"""Changes secrets of a set's members while they run, as docs/operate/operations.md says."""

from pathlib import Path
from typing import Any

from schedsvc.driver.clock import boot_ns
from schedsvc_lab.demo.processes import free_port
from tests.server.conftest import config_of, token_of
from tests.waiting import until

from .members import PEER_TOKEN, TOKEN, member, ready_store, running, settings
from .store_server import StoreServer
from .test_following import leads

NEW = "another secret, as long as one should be"


async def test_password_of_the_store_changes_without_a_new_term(
    store: StoreServer, tmp_path: Path
) -> None:
    await ready_store(store)
    old, password = "password of the members", tmp_path / "password"
    store.ask("ACL", "SETUSER", "members", "on", f">{old}", "~*", "&*", "+@all")
    url = store.url.replace("//", "//members@")
    a, b = member(tmp_path, "a", url), member(tmp_path, "b", url)
    password.write_text(old)
    async with running(a, b):
        await until(lambda: b._following.term == 1, "it follows")
        assert store.ask("ACL", "SETUSER", "members", f">{NEW}") == b"+OK\r\n"
        password.write_text(NEW)
        assert store.ask("ACL", "SETUSER", "members", f"<{old}") == b"+OK\r\n"
        assert store.ask("CLIENT", "KILL", "USER", "members") != b":0\r\n"
        for _ in range(2):  # the answer to an earlier renewal may be read after that
            before = a.leading.until_ns
            await until(lambda at=before: a.leading.until_ns > at, "it renews its term")
        await leads(a)
        assert b._following.term == 1


async def test_token_of_members_changes_without_a_new_term(
    store: StoreServer, tmp_path: Path
) -> None:
    await ready_store(store)

    def entry(*proofs: str) -> dict[str, Any]:
        """Return the members' entry of auth.principals, with these proofs."""
        made = {**token_of("peer", PEER_TOKEN), "pools": [], "member": True}
        if "old" not in proofs:
            del made["sha256"]
        return made | ({"token_file": str(tmp_path / "new")} if "new" in proofs else {})

    def auth(*proofs: str) -> dict[str, Any]:
        return {"principals": [token_of("shim", TOKEN), entry(*proofs)]}

    (tmp_path / "new").write_text(NEW)
    keys = settings(tmp_path, "a", store.url, free_port())
    a, b = member(tmp_path, "a", store.url), member(tmp_path, "b", store.url)
    streams, follow = [], b._following._follow

    async def counted(target: str) -> None:
        streams.append(boot_ns())
        await follow(target)

    b._following._follow = counted  # type: ignore[method-assign] # as often as it is called
    async with running(a, b):
        await until(lambda: b._following.term == 1, "it follows")
        keys = {**keys, "listeners": [{"tcp": a.targets[0]}]}
        keys["cluster"] = {**keys["cluster"], "advertise": a.targets[0]}
        a.reconfigure(config_of(**keys | {"auth": auth("old", "new")}))
        (tmp_path / "peer").write_text(NEW)
        a.reconfigure(config_of(**keys | {"auth": auth("new")}))
        # The stream by the old token ends at the reload.
        await until(lambda: len(streams) == 2, "its stream is over")
        await until(lambda: b._following._heard_ns > streams[1], "it follows by the new token")
        await leads(a)
        assert b._following.term == 1
        # A principal that is no member any more loses its stream, although its token is valid.
        no_member = {"principals": [token_of("shim", TOKEN), {**entry("new"), "member": False}]}
        a.reconfigure(config_of(**keys | {"auth": no_member}))
        await until(lambda: "`member: true`" in b._following.problem, "it is refused")
