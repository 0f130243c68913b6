"""Tests tokens that the scheduler makes: those of the samples, which other hosts can reach."""

import re
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.config import Config
from schedsvc.server.credentials import credentials_of

from .conftest import SHIM, calling, config_of, failure, serving
from .test_cli import run, scheduler
from .test_config import MINIMAL, found
from .test_principals import bearer

DEPLOY = Path(__file__).parents[2] / "deploy"
SAMPLES = ["container/schedsvc.yaml", "compose/schedsvc.yaml"]


def moved(sample: str, folder: Path) -> Path:
    """Write a sample for a folder of this machine, with ports of its own."""
    text = (DEPLOY / sample).read_text()
    for path in ("run/schedsvc", "var/lib/schedsvc", "var/lib/schedsvc-tokens"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    text = re.sub(r"(?<=: )/(?=(?:run|var)/)", f"{folder}/", text)
    text = re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", text)
    file = folder / "schedsvc.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_asks_for_the_token_that_its_first_start_makes(
    sample: str, tmp_path: Path
) -> None:
    """A caller of the published port could do everything except operate."""
    config = moved(sample, tmp_path)
    shown = run("check", str(config))
    assert shown.exit_code == 0, shown.output
    file = tmp_path / "var/lib/schedsvc-tokens/gate"
    tokens = []
    for _ in range(2):
        with scheduler(config) as (process, ready):
            tokens.append(file.read_text().strip())
            with grpc.insecure_channel(ready["targets"][1]) as channel:
                stub = stubs.SchedulerServiceStub(channel)
                with pytest.raises(grpc.RpcError) as refused:
                    stub.Stats(pb.StatsRequest())
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
                stub.Stats(pb.StatsRequest(), metadata=bearer(tokens[0]))
            process.terminate()
            assert tokens[0] not in process.communicate(timeout=30)[1]
    # It stays unchanged, for its owner alone.
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["gate"]


async def test_a_reload_makes_the_token_of_a_new_caller(tmp_path: Path) -> None:
    def principal(name: str) -> dict[str, Any]:
        return {"name": name, "token_file": str(tmp_path / name), "make_token": True, **SHIM}

    async with serving(auth={"principals": [principal("one")]}) as server:
        principals = [principal("one"), principal("two")]
        server.reconfigure(config_of(auth={"principals": principals}))
        for name in ("one", "two"):
            token = (tmp_path / name).read_text().strip()
            async with calling(server.targets[0]) as stub:
                assert (await stub.Stats(pb.StatsRequest(), metadata=bearer(token))).pools
                error = await failure(stub.Stats(pb.StatsRequest()))
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED


def test_another_process_makes_no_token(tmp_path: Path) -> None:
    """The edge has another user, whose file the scheduler could not read."""
    caller = {"name": "a", "token_file": str(tmp_path / "t"), "make_token": True}
    auth = {"principals": [caller]}
    config = Config.model_validate({"listeners": [{"unix": "s"}], "auth": auth})
    with pytest.raises(ValueError, match="cannot read this token file"):
        credentials_of(config)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{name: a, env: T, make_token: true}", "make_token: needs token_file beside it"),
        ("{name: a, token_file: no/t, make_token: true}", "no does not exist; make it"),
        ("{name: a, token_file: short, make_token: true}", "holds fewer than 16 characters"),
        ("{name: a, token_file: absent}", "cannot read this token file"),
    ],
)
def test_a_token_that_cannot_be_made_is_named(tmp_path: Path, entry: str, expected: str) -> None:
    (tmp_path / "short").write_text("short")
    text = f"auth: {{principals: [{entry}]}}\n{MINIMAL}"
    [problem] = found(tmp_path, text, T="a-token-that-is-long-enough")
    assert expected in problem
