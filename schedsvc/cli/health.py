"""`schedsvc health`: the health check of a container, where no probe can speak gRPC itself."""

import json
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from schedsvc_client.channel import bearer_metadata, open_channel
from schedsvc_client.errors import from_rpc_error

from schedsvc.cli.connect import Connection, connects
from schedsvc.option_types import FiniteRange

_EPILOG = """\b
Example:
  schedsvc health liveness --target unix:/run/schedsvc/schedsvc.sock
  schedsvc health readiness --target 127.0.0.1:7600 --timeout 1

liveness fails only if an invariant is broken, so that a restart helps. readiness also fails during
a drain, so never restart a process because of it.
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
    with open_channel(connection.target, connection.credentials) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service=name)
        metadata = bearer_metadata(connection.token)
        try:
            answer = check(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, connection.target) from None
    status = _STATUS.Name(answer.status)
    text = json.dumps({"name": name, "status": status}) if as_json else f"{name}: {status}"
    click.echo(text)
    if answer.status != _STATUS.SERVING:
        raise click.exceptions.Exit(1)
