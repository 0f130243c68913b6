"""Changes callers, tokens and certificates while the server runs."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.config import needs_restart
from schedsvc.server import Server
from tests.waiting import until

from .certificates import Authority
from .conftest import SHIM, ask, calling, config_of, failure, serving, token_of, totals

pytestmark = pytest.mark.usefixtures("both_transports")

FIRST, SECOND = "first-token-of-enough", "second-token-of-enough"


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


async def codes(server: Server, *tokens: str) -> list[str]:
    """Return the status that Stats has with each of these tokens."""
    async with calling(server.targets[0]) as stub:
        calls = [stub.Stats(pb.StatsRequest(), metadata=bearer(token)) for token in tokens]
        return [(await call.code()).name for call in calls]


async def test_token_file_is_read_again_though_the_file_is_the_same(tmp_path: Path) -> None:
    """It is read even if the configuration is unchanged."""
    token = tmp_path / "token"
    token.write_text(FIRST)
    auth = {"principals": [{"name": "gate", "token_file": str(token), **SHIM}]}
    async with serving(auth=auth) as server:
        assert await codes(server, FIRST, SECOND) == ["OK", "UNAUTHENTICATED"]
        token.write_text(SECOND)
        server.reconfigure(config_of(auth=auth))
        assert await codes(server, FIRST, SECOND) == ["UNAUTHENTICATED", "OK"]


async def test_unreadable_token_file_changes_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(FIRST)
    auth = {"principals": [{"name": "gate", "token_file": str(token), **SHIM}]}
    async with serving(auth=auth) as server:
        token.unlink()
        with pytest.raises(ValueError, match="cannot read this token file"):
            server.reconfigure(config_of(auth=auth, tenants=[{"name": "new"}]))
        assert await codes(server, FIRST) == ["OK"]
        assert server.driver.tenant_stats(b"new") == []


async def test_two_tokens_of_a_caller_change_over_without_a_gap() -> None:
    both = token_of("gate", FIRST) | {"env": "SCHEDSVC_TEST_TOKEN"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSVC_TEST_TOKEN", SECOND)
        async with serving(auth={"principals": [token_of("gate", FIRST)]}) as server:
            server.reconfigure(config_of(auth={"principals": [both]}))
            assert await codes(server, FIRST, SECOND) == ["OK", "OK"]
            server.reconfigure(config_of(auth={"principals": [token_of("gate", SECOND)]}))
            assert await codes(server, FIRST, SECOND) == ["UNAUTHENTICATED", "OK"]


async def test_grants_change_with_a_reload() -> None:
    def auth(*tenants: str) -> dict[str, Any]:
        return {"principals": [token_of("gate", FIRST, tenants=list(tenants))]}

    async with serving(auth=auth("a")) as server, calling(server.targets[0]) as stub:
        denied = await failure(stub.Admit(ask(10, tenant="b"), metadata=bearer(FIRST)))
        assert denied.code() == grpc.StatusCode.PERMISSION_DENIED
        server.reconfigure(config_of(auth=auth("b")))
        granted = await stub.Admit(ask(10, tenant="b"), metadata=bearer(FIRST))
        assert granted.outcome == pb.OUTCOME_GRANTED
        denied = await failure(stub.Admit(ask(10, tenant="a"), metadata=bearer(FIRST)))
        assert denied.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("remains", [True, False])
async def test_streams_of_a_withdrawn_caller_end_and_others_go_on(remains: bool) -> None:
    both = [token_of("gate", FIRST), token_of("other", SECOND)]
    # The last principal with a token is removed: the listener still asks for one.
    after = [both[1]] if remains else []
    async with serving(auth={"principals": both}) as server, calling(server.targets[0]) as stub:
        calls = [stub.Session(metadata=bearer(token)) for token in (FIRST, SECOND)]
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))
        for call in calls:
            await call.write(pb.SessionRequest(seq=1, events=[hello]))
            await call.read()
        granted = await stub.Admit(ask(10), metadata=bearer(FIRST))
        server.reconfigure(config_of(auth={"principals": after}))
        assert await calls[0].code() == grpc.StatusCode.UNAUTHENTICATED
        assert "withdrawn" in (await calls[0].details() or "")
        open_now = 1 if remains else 0
        await until(lambda: totals(server)["open_sessions"] == open_now, "streams have ended")
        assert totals(server)["live_leases"] == 1  # running requests go on until their TTL
        report = pb.CompleteRequest(lease_id=granted.grant.lease_id, pool_epoch=1)
        code = (await failure(stub.Complete(report, metadata=bearer(FIRST)))).code()
        assert code == grpc.StatusCode.UNAUTHENTICATED


def test_kind_of_proof_that_listeners_ask_for_needs_a_restart() -> None:
    tokens = config_of(auth={"principals": [token_of("gate", FIRST)]})
    assert needs_restart(config_of(), tokens) == ["listeners"]
    more = config_of(auth={"principals": [token_of("gate", FIRST), token_of("b", SECOND)]})
    assert needs_restart(more, tokens) == []


async def test_new_connections_get_the_certificate_of_a_reload(tmp_path: Path) -> None:
    first, second = (Authority(tmp_path, name) for name in ("first", "second"))
    files = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]

    def use(authority: Authority) -> None:
        own = authority.issue("scheduler")
        for file, held in zip(files, (own.cert, own.key, authority.cert), strict=True):
            file.write_bytes(held)

    async def code(authority: Authority) -> str:
        pair = authority.issue("gate")
        proof = grpc.ssl_channel_credentials(authority.cert, pair.key, pair.cert)
        async with calling(server.targets[0], proof) as stub:
            return (await stub.Stats(pb.StatsRequest(), timeout=5).code()).name

    use(first)
    tls = dict(zip(("cert", "key", "client_ca"), map(str, files), strict=True))
    listeners = [{"tcp": "127.0.0.1:0", "tls": tls}]
    async with serving(listeners=listeners) as server:
        assert [await code(first), await code(second)] == ["OK", "UNAVAILABLE"]
        use(second)
        server.reconfigure(config_of(listeners=listeners))
        assert [await code(first), await code(second)] == ["UNAVAILABLE", "OK"]


async def test_files_that_are_no_pair_change_nothing(tmp_path: Path) -> None:
    """With nghttp2 the reload fails; grpcio goes on with the last pair that was right."""
    authority = Authority(tmp_path)
    own, other = authority.issue("scheduler"), authority.issue("other")
    files = {name: tmp_path / f"own-{name}.pem" for name in ("cert", "key")}
    for name, file in files.items():
        file.write_bytes(getattr(own, name))
    tls = {name: str(file) for name, file in files.items()}
    listeners = [{"tcp": "localhost:0", "tls": tls}]
    async with serving(transport="nghttp2", listeners=listeners) as server:
        files["key"].write_bytes(other.key)
        with pytest.raises(OSError, match=r"(?i)mismatch"):
            server.reconfigure(config_of(transport="nghttp2", listeners=listeners))
        proof = grpc.ssl_channel_credentials(authority.cert)
        options = {"ssl_target_name_override": "scheduler"}
        async with calling(server.targets[0], proof, **options) as stub:  # type: ignore[arg-type]
            assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
