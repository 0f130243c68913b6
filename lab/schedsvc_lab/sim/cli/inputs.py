"""Reads the inputs of a simulation, and reports errors in them before anything starts."""

from pathlib import Path

import click

from schedsvc.config import Config, ConfigError, load
from schedsvc_lab.engine import Profile, ProfileError, load_profile
from schedsvc_lab.sim.requests import Requests, RequestsError
from schedsvc_lab.workload import TraceError


def requests_of(path: Path, tenant: str) -> Requests:
    """Read the whole trace first, so that an error in its last line shows up before the run."""
    try:
        return Requests.read(path, tenant)
    except (TraceError, RequestsError, OSError) as error:
        raise click.ClickException(str(error)) from None


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
