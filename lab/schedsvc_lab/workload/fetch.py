"""Downloads public traces from their publishers, with checksum and resume."""

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

__all__ = ["FetchError", "Fetched", "Source", "fetch", "sources"]

TRIES = 5
_PAUSE_S = 0.5
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_HEX_CHARS = 64
_AGENT = "schedsvc"

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes so far, and with the total, or None if it is unknown."""


class FetchError(RuntimeError):
    """A file cannot be fetched; the text names it, says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """Names a public file. `sha256` None: the publisher's file may change, or none is known."""

    name: str
    url: str
    form: str = ""
    about: str = ""
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        """Return the last part of the address."""
        return urlsplit(self.url).path.rpartition("/")[2] or self.name


@dataclass(frozen=True, slots=True)
class Fetched:
    """Describes a file that is here. `checked` says what its checksum was compared with."""

    path: Path
    size_bytes: int
    sha256: str
    checked: str


def sources() -> dict[str, Source]:
    """Return the known files by name."""
    listed = yaml.safe_load(files("schedsvc_lab.workload").joinpath("sources.yaml").read_text())
    return {name: Source(name=name, **fields) for name, fields in listed.items()}


def fetch(source: Source, folder: Path, progress: Progress | None = None) -> Fetched:
    """Download a file into a folder, or check the existing one. O(bytes).

    Until it is complete and its checksum is right it is FILE.partial; a later call resumes an
    earlier one, unless the file has changed at its source meanwhile. The checksum is compared with
    the source's, else with the one that the server states (`x-linked-etag`, which Hugging Face
    sends), else with the one of the first download, which is kept in FILE.sha256. Raises
    FetchError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / source.file_name
    download = _Download(source, path, progress or (lambda _have, _whole: None))
    if not path.exists():
        download.run()
    digest = download.digest(path)
    checked = _check(source, path, digest, download.stated)
    return Fetched(path, path.stat().st_size, digest, checked)


def _check(source: Source, path: Path, digest: str, stated: str | None) -> str:
    """Compare a checksum with the known one. Raises FetchError; then the file is set aside."""
    noted = path.with_name(path.name + ".sha256")
    for wanted, what in (
        (source.sha256, "the published file"),
        (stated, "what the server states"),
        (noted.read_text().split()[0] if noted.exists() else None, "the first download"),
    ):
        if wanted is None:
            continue
        if wanted != digest:
            bad = path.with_name(path.name + ".bad")
            path.replace(bad)
            raise FetchError(
                f"{path}: its SHA-256 is {digest}, but {what} has {wanted}; it was moved to {bad}. "
                "Fetch it again; if that does not help, it has changed at its source"
            )
        return what
    noted.write_text(f"{digest}  {path.name}\n")
    return "nothing: none is published; it is noted for the next time"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and keeps the SHA-256 that Hugging Face states in the first of them."""

    stated: str | None = None

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Follow a redirect."""
        self.note(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def note(self, headers: Mapping[str, Any]) -> None:
        """Keep what an answer's headers state."""
        stated = str(headers.get("X-Linked-ETag", "")).strip('"').lower()
        if len(stated) == _HEX_CHARS and not set(stated) - set("0123456789abcdef"):
            self.stated = stated


class _Download:
    """Downloads one file, in as many tries as it takes."""

    def __init__(self, source: Source, path: Path, progress: Progress) -> None:
        self.partial = path.with_name(path.name + ".partial")
        self._redirects = _Redirects()
        self._opener = urllib.request.build_opener(self._redirects)
        self._state = path.with_name(path.name + ".partial.json")
        self._source = source
        self._path = path
        self._progress = progress

    @property
    def stated(self) -> str | None:
        """Return the SHA-256 that the server stated, if it did."""
        return self._redirects.stated

    def run(self) -> None:
        """Download the file, and put it in its place."""
        left = TRIES
        while True:
            before = self._have()
            try:
                complete = self._try()
            except urllib.error.HTTPError as error:
                if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise FetchError(self._told(f"the server answers {error.code}")) from None
                reason = f"the server answers {error.code}"
                complete = False
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", "") or error) or type(error).__name__
                complete = False
            else:
                reason = "the connection was closed too early"
            if complete:
                break
            # A try that brought more of the file does not count as failed.
            left = TRIES if self._have() > before else left - 1
            if left == 0:
                raise FetchError(self._told(reason))
            time.sleep(_PAUSE_S * (TRIES - left))
        self.partial.replace(self._path)
        self._state.unlink(missing_ok=True)

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file. O(bytes)."""
        whole = path.stat().st_size
        sums, done = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                sums.update(chunk)
                done += len(chunk)
                self._progress(done, whole)
        return sums.hexdigest()

    def _have(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _told(self, reason: str) -> str:
        have = self._have()
        rest = f"; {have:,} bytes are kept in {self.partial}, and the next try goes on from there"
        return f"{self._source.url}: {reason}" + (rest if have else "")

    def _try(self) -> bool:
        """Download the missing part. False if the server ended before the end."""
        have, validator = self._have(), self._validator()
        # Without a validator there is no proof that it is the same file.
        headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
        if have and validator:
            headers |= {"Range": f"bytes={have}-", "If-Range": validator}
        request = urllib.request.Request(  # noqa: S310 - the list and --url have http(s) alone
            self._source.url, headers=headers
        )
        try:
            answer = self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            # All of it may be here already, or it has changed: start over to be sure.
            self.partial.unlink()
            return False
        with answer:
            self._redirects.note(answer.headers)
            resumed = answer.status == HTTPStatus.PARTIAL_CONTENT and _starts_at(answer, have)
            have = have if resumed else 0
            length = answer.headers.get("Content-Length")
            whole = have + int(length) if length and length.isdigit() else None
            self._state.write_text(json.dumps({"validator": _validator_of(answer.headers)}))
            with self.partial.open("ab" if resumed else "wb") as file:
                while chunk := answer.read(_CHUNK_BYTES):
                    file.write(chunk)
                    have += len(chunk)
                    self._progress(have, whole)
        return whole is None or have == whole

    def _validator(self) -> str | None:
        try:
            known = json.loads(self._state.read_text())["validator"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return known if isinstance(known, str) else None


def _validator_of(headers: Mapping[str, Any]) -> str | None:
    """Return what names this very version of the file: a strong ETag, else its time."""
    etag = headers.get("ETag")
    if isinstance(etag, str) and not etag.startswith("W/"):
        return etag
    modified = headers.get("Last-Modified")
    return modified if isinstance(modified, str) else None


def _starts_at(answer: http.client.HTTPResponse, have: int) -> bool:
    unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
    return unit == "bytes" and rest.startswith(f"{have}-")
