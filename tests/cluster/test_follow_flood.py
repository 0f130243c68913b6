"""Tests a member that follows again and again, and what its leader logs of it."""

import json
from pathlib import Path

from schedsvc_client.v1 import follow_pb2 as pb
from schedsvc_client.v1.follow_pb2_grpc import FollowServiceStub

from schedsvc.config import load
from schedsvc.server.cluster import set_fingerprint
from tests.server.conftest import open_channel
from tests.waiting import until

from .member_process import MemberProcess, leads
from .members import PEER_TOKEN, proof, ready_store
from .store_server import StoreServer


async def test_a_flood_of_followers_writes_few_lines(store: StoreServer, tmp_path: Path) -> None:
    await ready_store(store)
    a, count = MemberProcess(tmp_path, "a", store.url), 300
    try:
        await a.start()
        await until(lambda: leads(a), "it leads")
        hello = pb.FollowRequest(member="x", fingerprint=set_fingerprint(load(tmp_path / "a.yaml")))
        async with open_channel(a.target) as channel:
            stub = FollowServiceStub(channel)
            for _ in range(count):
                call = stub.Follow(metadata=proof(PEER_TOKEN), timeout=60)
                await call.write(hello)
                assert await call.read()
                call.cancel()
    finally:
        a.end()
    lines = (tmp_path / "a.log").read_text().splitlines()
    followers = [line for line in lines if json.loads(line)["event"] == "follower"]
    assert 100 <= len(followers) < count
