"""Starts a scheduler, an emulated engine and a gate for a first request: `quickstart`."""

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import click

from schedsvc_lab.demo.processes import DemoError, Program, guarded, running, until_signalled
from schedsvc_lab.quickstart.files import Made, QuickstartError, make, read_tenants

EPILOG = """\b
Example:
  schedsvc quickstart
  schedsvc quickstart research production=4 --folder try

The share of a tenant grows with its weight; 1 is the usual one. Writes schedsvc.yaml, keys and the
logs of the programs into the folder, which must not exist yet. Everything listens on this host
alone, at free ports. The engine is an emulator and needs no GPU.
"""
_TENANTS = "research production=4"
_MODEL = "emulated"


@click.command("quickstart", epilog=EPILOG)
@click.option(
    "--folder",
    default="schedsvc-quickstart",
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="New folder for the configuration, the keys and the logs.",
)
@click.argument("tenants", metavar="[NAME[=WEIGHT]]...", nargs=-1)
@click.option("--yes", is_flag=True, help="Ask nothing, and take the defaults.")
def quickstart(folder: Path, tenants: tuple[str, ...], yes: bool) -> None:
    """Start a scheduler, an emulated engine and a gate, and print a request to send.

    Ctrl-C ends all of them. The folder stays.
    """
    wanted = " ".join(tenants)
    if not tenants and not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "stdin is no terminal, so nothing can be asked; give --yes, or name tenants"
        )
    if not tenants:
        wanted = _TENANTS if yes else click.prompt("Tenants, as NAME or NAME=WEIGHT", _TENANTS)
    try:
        made = make(folder, read_tenants(wanted))
        asyncio.run(until_signalled(_serve(made)))
    except (DemoError, QuickstartError) as error:
        raise click.ClickException(str(error)) from None
    except asyncio.CancelledError:
        raise click.ClickException("ended by a signal") from None
    except KeyboardInterrupt:
        click.echo(f"Ended. {made.config.parent} stays.")


async def _serve(made: Made) -> NoReturn:
    """Run the programs until a signal, or until one of them ends. Raises DemoError."""
    folder, target = made.config.parent, f"unix:{made.socket}"
    gate = {"SCHEDSVC_TARGET": target, "SCHEDSVC_UNREACHABLE": "closed"}
    emulate = ("emulate", "--port", "0", "--middleware", "schedsvc_vllm.gate.Gate")
    async with (
        running("scheduler", ("serve", "--config", str(made.config)), folder) as scheduler,
        running("engine", (*emulate, "--model", _MODEL), folder, gate) as engine,
    ):
        click.echo(_text(made, scheduler, engine))
        ends = (program.wait_for_end() for program in (scheduler, engine))
        await guarded(asyncio.Event().wait(), *ends)
        raise AssertionError("nothing sets the event")


def _text(made: Made, scheduler: Program, engine: Program) -> str:
    """Say where everything is, and how to send a request."""
    url = json.loads(engine.ready)["base_url"]
    metrics = json.loads(scheduler.ready)["metrics"]
    name, key = next(iter(made.keys.items()))
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": _MODEL, "messages": messages, "max_tokens": 16})
    return f"""\
A scheduler, an emulated engine and a gate run. Configuration, keys and logs:
  {made.config.parent}

Send a request of the tenant {name}:
  curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \
-H 'Content-Type: application/json' -d {shlex.quote(body)}

The same with OpenAI's SDK:
  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  client.chat.completions.create(model="{_MODEL}", messages={json.dumps(messages)}, max_tokens=16)

Watch it:
  {metrics.removesuffix("metrics")}
  schedsvc top --target {shlex.quote(f"unix:{made.socket}")}

Ctrl-C ends all."""
