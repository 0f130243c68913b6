"""Runs the store's functions in a Lua of this process, of the version that servers embed."""

import hashlib
import struct
import weakref
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgpack
from lupa import lua51

from schedsvc_lab.faults.cluster.keyspace import ServerError

__all__ = ["Scripts"]

_SERVER = (files("schedsvc_lab.faults.cluster") / "server.lua").read_bytes()
#: Carries out a command. Raises ServerError.
Command = Callable[[str, list[bytes]], Any]


class Scripts:
    """Holds the libraries of a server.

    Lua holds the Python functions that it calls, and Python finds no cycle through Lua. So these
    functions refer to this object weakly, and `command` has to refer weakly to its owner.
    """

    def __init__(self, command: Command) -> None:
        def called(name: object = None, *args: object) -> Any:
            try:
                return command(_word(name).decode().upper(), [
                    arg if type(arg) is bytes else _word(arg) for arg in args
                ])  # fmt: skip
            except ServerError as error:
                return True, str(error).encode()

        me = weakref.ref(self)

        def unpacked(data: bytes) -> Any:
            found = _unpacked(data)
            if not isinstance(found, list | dict):
                return found
            return me()._lua.table_from(found, recursive=True)  # type: ignore[union-attr]

        self._lua = lua51.LuaRuntime(
            encoding=None, register_eval=False, register_builtins=False,
            unpack_returned_tuples=True,
        )  # fmt: skip
        self._load, self._reads, self._run = self._lua.execute(
            _SERVER, called, _pack_struct, _sha1, _pack, unpacked, list, _extend
        )

    def load(self, source: str) -> None:
        """Load a library, as FUNCTION LOAD does. Raises LuaError."""
        self._load(source.encode())

    def only_reads(self, function: str) -> bool | None:
        """Return whether a function says that it only reads; None if the function is missing."""
        found: bool | None = self._reads(function.encode())
        return found

    def run(self, function: str, keys: list[bytes], args: list[bytes]) -> Any:
        """Return a function's answer, with texts as bytes. Raises ServerError."""
        table = self._lua.table_from
        done, found = self._run(function.encode(), table(keys), table(args))
        if isinstance(found, Exception):
            raise found
        if not done:
            raise ServerError(found.decode(errors="replace"))
        return found


def _word(arg: object) -> bytes:
    """Return an argument as a server takes it from Lua."""
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, bool) or not isinstance(arg, int | float):
        raise ServerError("ERR Lua redis lib command arguments must be strings or integers")
    return b"%d" % arg if isinstance(arg, int) else b"%.17g" % arg


def _sha1(text: bytes) -> bytes:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


def _pack_struct(form: bytes, *values: Any) -> bytes:
    return struct.pack(form.decode(), *values)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(_plain(value), use_bin_type=False)
    return packed


def _plain(value: Any) -> Any:
    """Return a value of Lua in types of Python. A table is a list if it has the keys of one."""
    if value is None or isinstance(value, bytes | int | float):
        return value
    fields = {key: _plain(each) for key, each in value.items()}
    is_list = all(place in fields for place in range(1, len(fields) + 1))
    return [fields[place] for place in range(1, len(fields) + 1)] if is_list else fields


def _unpacked(data: bytes) -> Any:
    """Return the first of the values that a text has packed. Raises ValueError if it has others."""
    reader = msgpack.Unpacker(raw=True, strict_map_key=False)
    reader.feed(data)
    found = list(reader)
    if reader.tell() < len(data):
        raise ValueError("Missing bytes in input.")
    return found[0] if found else None


def _extend(found: list[Any], *values: Any) -> None:
    found.extend(values)
