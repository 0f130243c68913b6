"""Checks the health of a container where no probe can speak gRPC itself: `schedsvc health`."""

import json
from contextlib import ExitStack
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from schedsvc_client.channel import bearer_metadata, open_channel
from schedsvc_client.errors import from_rpc_error
from schedsvc_client.targets import check_targets

from schedsvc.cli.connect import Connection, connects, explained
from schedsvc.text.option_types import FiniteRange

_EPILOG = """\b
Examples:
  schedsvc health liveness --target unix:/run/schedsvc/schedsvc.sock
  schedsvc health readiness --target 127.0.0.1:7600 --timeout 1
  schedsvc health --target 10.0.0.1:7600,10.0.0.2:7600

liveness fails only if an invariant is broken, so that a restart helps. readiness also fails during
a drain, so never restart a process because of it.

With several targets, such as a leader and its standby, the command prints a line for each. It exits
with status 0 only if all answer and, for readiness, at least one is SERVING; for liveness, all are.
"""
_STATUS = health_pb2.HealthCheckResponse.ServingStatus


@click.command(epilog=_EPILOG)
@connects
@click.argument("name", type=click.Choice(["liveness", "readiness"]), default="readiness")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0.0, min_open=True),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait up to SECONDS for the answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the name and its status as JSON.")
def health(connection: Connection, name: str, timeout_s: float, as_json: bool) -> None:
    """Ask for the health of a scheduler; exit with status 0 only if it is SERVING."""
    answers = _ask(connection, name, timeout_s)
    if len(answers) == 1:
        ((_, answer),) = answers
        if isinstance(answer, grpc.RpcError):
            raise from_rpc_error(answer, connection.target) from None
        status = _STATUS.Name(answer)
        told = {"name": name, "status": status}
        click.echo(json.dumps(told) if as_json else f"{name}: {status}")
    for target, answer in answers if len(answers) > 1 else ():
        click.echo(_line(target, name, answer, as_json))
    serving = [answer == _STATUS.SERVING for _, answer in answers]
    has_all = not any(isinstance(answer, grpc.RpcError) for _, answer in answers)
    if not has_all or not (all(serving) if name == "liveness" else any(serving)):
        raise click.exceptions.Exit(1)


def _ask(connection: Connection, name: str, timeout_s: float) -> list[tuple[str, Any]]:
    """Ask all targets at once; return each with its status, or with the error of its call."""
    request = health_pb2.HealthCheckRequest(service=name)
    metadata = bearer_metadata(connection.token)
    with ExitStack() as channels:
        calls = []
        for target in check_targets(connection.target):
            channel = channels.enter_context(open_channel(target, connection.credentials))
            check: Any = health_pb2_grpc.HealthStub(channel).Check
            calls.append((target, check.future(request, timeout=timeout_s, metadata=metadata)))
        return [(target, call.exception() or call.result().status) for target, call in calls]


def _line(target: str, name: str, answer: Any, as_json: bool) -> str:
    """Return what one of several targets answered."""
    told = {"target": target, "name": name, "status": "NO_ANSWER"}
    if isinstance(answer, grpc.RpcError):
        told["reason"] = explained(target, from_rpc_error(answer, target))
    else:
        told["status"] = _STATUS.Name(answer)
    if as_json:
        return json.dumps(told)
    reason = f" ({told['reason']})" if "reason" in told else ""
    return f"{target}: {name}: {told['status']}{reason}"
