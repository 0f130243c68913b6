"""Finds a bearer token in its file or variable.

The token itself is dropped at once; its hash stays.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from schedsvc.config.files import read_file

__all__ = ["TOKEN_LENGTH_MIN", "make_token", "token_digest"]

#: A shorter token could be guessed from its hash.
TOKEN_LENGTH_MIN = 16
_FILE_BYTES_MAX = 4_096


def token_digest(
    *,
    sha256: str | None = None,
    env: str | None = None,
    token_file: Path | None = None,
    environ: Mapping[str, str],
) -> bytes:
    """Return the SHA-256 of a token that is given by hash, environment variable or file.

    Raises ValueError with a sentence that says what to do. It repeats neither the token nor the
    name of its source, because a user may have written the token there.
    """
    if sha256 is not None:
        return bytes.fromhex(sha256)
    if env is not None:
        token = environ.get(env, "")
        if not token:
            raise ValueError("this environment variable is not set; export the token in it")
        return _digest(token, "this environment variable")
    if token_file is not None:
        try:
            # Editors of some systems begin a text with a byte order mark.
            token = read_file(token_file).decode("utf-8-sig").strip()
        except OSError as error:
            raise ValueError(f"cannot read this token file: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError("this token file is not text") from None
        return _digest(token, "this token file")
    raise ValueError("give the token by one of sha256, env or token_file")


def make_token(file: Path) -> bool:
    """Write a random token to a file for its owner alone, unless there is one. Whether it did.

    A reader finds the whole token or no file. Raises ValueError if the file cannot be written.
    """
    if file.exists():
        return False
    partial = file.with_name(f".{secrets.token_hex(8)}")
    try:
        opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(opened, f"{secrets.token_hex(32)}\n".encode())
            os.fsync(opened)
        finally:
            os.close(opened)
        os.link(partial, file)
    except FileExistsError:
        return False
    except OSError as error:
        raise ValueError(f"cannot make the token file: {error.strerror}") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return True


def _digest(token: str, source: str) -> bytes:
    if len(token) < TOKEN_LENGTH_MIN:
        raise ValueError(f"{source} holds fewer than {TOKEN_LENGTH_MIN} characters; make it longer")
    if len(token) > _FILE_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise ValueError(f"{source} has to hold one line of at most {_FILE_BYTES_MAX} characters")
    return hashlib.sha256(token.encode()).digest()
