"""Reads the inputs of a simulation, and reports errors in them before anything starts."""

from pathlib import Path

import click

from schedsvc.config import Config, ConfigError, load
from schedsvc_lab.engine import Profile, ProfileError, load_profile
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.workload import TraceError, read_trace

#: The core's own bound on the tokens of one request.
TOKENS_MAX = 1 << 27


def requests_of(path: Path, tenant: str) -> Requests:
    """Read the whole trace first, so that an error in its last line shows up before the run."""
    try:
        requests = Requests.from_trace(read_trace(path, tenant=tenant, keep_records=True))
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for at, prompt in enumerate(requests.prompt_tokens):
        if prompt + requests.output_tokens[at] > TOKENS_MAX:
            raise click.ClickException(
                f"{path}: request {at + 1} of client "
                f"{requests.clients[requests.client[at]]!r} has {prompt} input and "
                f"{requests.output_tokens[at]} output tokens; at most {TOKENS_MAX} in all"
            )
    return requests


def profile_of(name: str) -> Profile:
    """Load an engine's profile."""
    try:
        return load_profile(name)
    except ProfileError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from None


def config_of(path: Path | None) -> Config | None:
    """Load the server's configuration, if one is given."""
    if path is None:
        return None
    try:
        return load(path)
    except ConfigError as error:
        raise click.ClickException(f"{error}\n{path} is not valid") from None
