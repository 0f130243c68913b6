"""Shows a running scheduler in a terminal, live: `schedsvc top`."""

import sys

import click

from schedsvc.cli.connect import Connection, connects
from schedsvc.text.option_types import FiniteRange

_EPILOG = """\b
Example:
  schedsvc top --target unix:/run/schedsvc/schedsvc.sock
  schedsvc top --every 5 --filter research

\b
Keys:
  Enter   show the tenant of the row   s, r  sort by another column, reverse
  w       search a request by its id   /     filter tenants by name
  Escape  go back, or drop the filter  p, q  pause, quit

It needs the extra `top`: pip install 'schedsvc[top]'. `schedsvc stats` prints the same for scripts.
"""


@click.command(epilog=_EPILOG)
@connects
@click.option(
    "--every",
    "every_s",
    default=1.0,
    show_default=True,
    type=FiniteRange(min=0.2, max=3_600),
    metavar="SECONDS",
    help="Refresh every SECONDS.",
)
@click.option("--filter", "wanted", default="", metavar="TEXT", help="Show tenants with TEXT.")
def top(connection: Connection, every_s: float, wanted: str) -> None:
    """Show pools, tenants and who waits; sort, filter, and look into one tenant or request."""
    # Textual is in an extra, and only a screen needs it.
    from schedsvc.cli.top_app import Top

    if not sys.stdout.isatty():
        raise click.UsageError(
            "`schedsvc top` needs a terminal; `schedsvc stats --watch` prints the same for scripts"
        )
    Top(connection, every_s=every_s, wanted=wanted).run()
