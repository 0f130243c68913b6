"""Serves DNS for one name, whose address a test changes."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_A, _IN = 1, 1


class NameServer:
    """Answers every question for an A record with `address`, and all others with no record."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        #: The authority of a URI `dns://AUTHORITY/HOST:PORT`.
        self.authority = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Answer until the socket is shut down."""
        while True:
            query, client = self._socket.recvfrom(4_096)
            if not query:
                return
            self._socket.sendto(self._answer(query), client)

    def stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())

    def close(self) -> None:
        self._socket.close()

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", 12) + 5  # end of the question: its name, type, and class
        kind = struct.unpack("!H", query[end - 4 : end - 2])[0]
        count = int(kind == _A)
        head = query[:2] + struct.pack("!HHHHH", 0x8580, 1, count, 0, 0)
        record = struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, 4) + socket.inet_aton(self.address)
        return head + query[12:end] + record * count


@contextmanager
def name_server(address: str) -> Iterator[NameServer]:
    """Run one in a thread."""
    server = NameServer(address)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()
