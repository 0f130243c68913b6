"""Completes names on the command line by asking the scheduler; the shell calls it at each TAB.

It asks the scheduler that the line names, or the default one. It completes nothing, and prints
nothing, if none answers in time.
"""

import re
from collections.abc import Callable, Iterable
from itertools import islice

import click
from schedsvc_client import ClientOptions, SchedulerError
from schedsvc_client.operator import Operator
from schedsvc_client.sync import Scheduler

from schedsvc.cli.connect import Connection, connection_of

__all__ = ["complete_leases", "complete_pools", "complete_request_ids", "complete_tenants"]

#: A person who presses TAB does not wait longer.
_ANSWER_S_MAX = 0.3
_OPTIONS = ClientOptions(call_deadline_s=_ANSWER_S_MAX)
#: A longer list helps no one to choose, and takes the scheduler longer than a person waits.
_NAMES_MAX = 1_000

#: Clients choose names, and the shell puts one on the line as it is: a name that the shell or the
#: command would read as more than a word is not completed.
_PLAIN = re.compile(r"\w[\w.,:@/+=-]*")

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _completion(ask: Callable[[Connection], Iterable[str]]) -> Completion:
    """Make click's callback out of a function that asks for all names."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        try:
            names = set(ask(connection_of(context.params)))
        except (SchedulerError, ValueError, OSError, click.UsageError):
            return []
        return sorted(n for n in names if n.startswith(incomplete) and _PLAIN.fullmatch(n))

    return complete


@_completion
def complete_pools(connection: Connection) -> Iterable[str]:
    """Return the names of the scheduler's pools."""
    with Operator(connection.target, **connection.proof, options=_OPTIONS) as operator:
        return [pool.name for pool in operator.stats().pools]


@_completion
def complete_tenants(connection: Connection) -> Iterable[str]:
    """Return the names of tenants, those with the most service."""
    with Scheduler(connection.target, **connection.proof, options=_OPTIONS) as scheduler:
        return [flow.tenant for flow in scheduler.stats(flow_limit=_NAMES_MAX).flows]


@_completion
def complete_leases(connection: Connection) -> Iterable[str]:
    """Return the ids of leases that run."""
    with Operator(connection.target, **connection.proof, options=_OPTIONS) as operator:
        leases = islice(operator.leases(page_size=_NAMES_MAX), _NAMES_MAX)
        return [str(lease.lease_id) for lease in leases]


@_completion
def complete_request_ids(connection: Connection) -> Iterable[str]:
    """Return the ids of the last requests that the caller may see."""
    with Scheduler(connection.target, **connection.proof, options=_OPTIONS) as scheduler:
        return scheduler.request_ids()
