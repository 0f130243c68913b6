"""Defines `schedsvc workload fetch`."""

import json
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from schedsvc.text.option_types import make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.workload.fetch import Fetched, FetchError, Source, sources
from schedsvc_lab.workload.fetch import fetch as download

EPILOG = """\b
Example:
  schedsvc workload fetch --list
  schedsvc workload fetch mooncake-conversation --out traces
  schedsvc workload fetch --url https://example.org/trace.jsonl --out traces

If the download breaks off, the same command goes on from there.
"""


@click.command("fetch", epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--list", "list_them", is_flag=True, help="List the names.")
@click.option("--url", metavar="URL", help="Fetch this address instead of a known one.")
@click.option("--sha256", metavar="DIGEST", help="Require this SHA-256 of the file.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("traces"),
    show_default=True,
    help="Folder to write to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def fetch(
    name: str | None, list_them: bool, url: str | None, sha256: str | None, out: Path, as_json: bool
) -> None:
    """Download the public trace NAME from its publisher's site, and check it.

    The checksum is compared with the published one, with the server's, or with that of the first
    download.
    """
    if list_them:
        _list(as_json)
        return
    source = _source(name, url, sha256)
    make_folder(out)
    try:
        fetched = _fetch(source, out)
    except (FetchError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.ClickException(
            f"interrupted; what is here stays in {out}, and the same command goes on from there"
        ) from None
    if as_json:
        result = {
            "path": str(fetched.path),
            "bytes": fetched.size_bytes,
            "sha256": fetched.sha256,
            "checked_with": fetched.checked,
            "form": source.form or None,
        }
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(f"{fetched.path}: {fetched.size_bytes:,} bytes, SHA-256 {fetched.sha256}")
    click.echo(f"compared with {fetched.checked}")


def _source(name: str | None, url: str | None, sha256: str | None) -> Source:
    if sha256 is not None:
        sha256 = sha256.lower()
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise click.BadParameter("must be 64 hexadecimal digits", param_hint="--sha256")
    known = sources()
    if (name is None) == (url is None):
        raise click.UsageError(f"give a NAME or --url; known names: {', '.join(known)}")
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise click.BadParameter(
                f"must be an http or https address, is {url!r}", param_hint="--url"
            )
        return Source("trace", url, sha256=sha256)
    if name not in known:
        raise click.BadParameter(
            f"{name!r} is unknown; known names: {', '.join(known)}", param_hint="NAME"
        )
    found = known[name]
    return Source(found.name, found.url, found.form, found.about, sha256 or found.sha256)


def _fetch(source: Source, out: Path) -> Fetched:
    """Download with a bar if the output is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(source.file_name, total=None)

        def progress(have: int, whole: int | None) -> None:
            bar.update(task, completed=have, total=whole)

        return download(source, out, progress)


def _list(as_json: bool) -> None:
    known = sources()
    if as_json:
        fields = ("url", "form", "about", "sha256")
        listed = {name: {key: getattr(s, key) for key in fields} for name, s in known.items()}
        click.echo(json.dumps(listed, indent=2))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("form", no_wrap=True)
    table.add_column("what")
    for name, source in known.items():
        table.add_row(name, source.form, source.about)
    table_console(markup=True).print(table)
