"""How processes exchange a few bytes before and between collectives: rank 0 listens, the others connect, and
all values go through rank 0. Records have a fixed form; nothing is unpickled.

    hello    magic, version, token, rank, size        from each other rank, once
    value    kind, number of the call, length, bytes  both ways; kind _FAILED: the reason and the ranks
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import NoReturn

from .environment import Place
from .errors import RankError, named

_HELLO = struct.Struct("!4sH32sII")
_VALUE = struct.Struct("!BIQ")
_MAGIC, _VERSION = b"cf8r", 1
_ALL, _FAILED = 0, 1
_MOST_BYTES = 1 << 32               # largest value
_HELLO_SECONDS = 2.0                # time for a peer to identify itself
_SLACK = 5.0                        # seconds that others wait longer than rank 0, which knows who is late


class Rendezvous:
    """One rank's connection to the others. All ranks make calls in the same order."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.rank, self.size, self._timeout, self._calls = place.rank, place.size, timeout, 0
        self._failed: RankError | None = None
        self._peers: dict[int, socket.socket] = {}
        if place.size > 1:
            self._peers = _accept(place, timeout) if place.rank == 0 else {0: _connect(place, timeout)}

    def gather(self, value: bytes = b"", timeout: float | None = None) -> list[bytes]:
        """Return the values of all ranks, by rank; also a barrier. Raises RankError if a rank has ended or
        does not come in time; every later call raises it too."""
        if self._failed is not None:
            raise RankError(f"a call before has failed: {self._failed}", self._failed.ranks)
        if len(value) > _MOST_BYTES:
            raise ValueError(f"value: expected at most {_MOST_BYTES} bytes, got {len(value)}")
        self._calls += 1
        if self.size == 1:
            return [value]
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        try:
            return self._collect(value, deadline) if self.rank == 0 else self._ask(value, deadline + _SLACK)
        except RankError as error:
            self._failed = error
            raise

    def close(self) -> None:
        """Close the connections. Later calls do nothing."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}
        if self.size > 1 and self._failed is None:
            self._failed = RankError("the world was closed")

    # ---- rank 0 ----
    def _collect(self, own: bytes, deadline: float) -> list[bytes]:
        values: dict[int, bytes] = {0: own}
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while len(values) < self.size:
                late = [rank for rank in range(self.size) if rank not in values]
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail(f"{named(late)} did not come in time", late)
                for key, _ in ready:
                    rank = key.data
                    try:
                        values[rank] = _receive(self._peers[rank], self._calls, deadline)
                    except (OSError, EOFError, ValueError, _Refused) as error:
                        self._fail(f"rank {rank} has ended or sends something else: {error}", [rank])
                    selector.unregister(self._peers[rank])
        gathered = [values[rank] for rank in range(self.size)]
        packed = struct.pack(f"!{self.size}Q", *map(len, gathered)) + b"".join(gathered)
        gone = [rank for rank, peer in self._peers.items()
                if not _sent(peer, _ALL, self._calls, packed, deadline + _SLACK)]
        if gone:
            self._fail(f"{named(gone)} ended during a call", gone)
        return gathered

    def _fail(self, message: str, ranks: Sequence[int]) -> NoReturn:
        reason = struct.pack(f"!I{len(ranks)}I", len(ranks), *ranks) + message.encode()
        for rank, peer in self._peers.items():
            if rank not in ranks:
                _sent(peer, _FAILED, self._calls, reason, time.monotonic() + _SLACK)
        raise RankError(message, ranks)

    # ---- the others ----
    def _ask(self, value: bytes, deadline: float) -> list[bytes]:
        server = self._peers[0]
        try:
            _send(server, _ALL, self._calls, value, deadline)
            packed = _receive(server, self._calls, deadline)
        except _Refused as refused:
            raise RankError(str(refused), refused.ranks) from None
        except (OSError, EOFError, ValueError) as error:
            raise RankError(f"rank 0 has ended or is late: {error}", [0]) from None
        at = 8 * self.size
        lengths = struct.unpack(f"!{self.size}Q", packed[:at])
        values = []
        for length in lengths:
            values.append(packed[at:at + length])
            at += length
        return values


class _Refused(Exception):
    def __init__(self, reason: bytes) -> None:
        end = 4 + 4 * int.from_bytes(reason[:4], "big")
        self.ranks = struct.unpack(f"!{end // 4 - 1}I", reason[4:end]) if end <= len(reason) else ()
        super().__init__(reason[end:].decode(errors="replace"))


# ---- connections ----
def _accept(place: Place, timeout: float) -> dict[int, socket.socket]:
    """Return the connections to all other ranks, by rank."""
    found: dict[int, socket.socket] = {}
    try:
        _accept_into(found, place, timeout)
    except BaseException:
        for peer in found.values():
            peer.close()
        raise
    return found


def _accept_into(found: dict[int, socket.socket], place: Place, timeout: float) -> None:
    """Accept the other ranks, and close connections of anyone else."""
    deadline = time.monotonic() + timeout
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((place.address, place.port))
        except OSError as error:
            raise RankError(f"rank 0 cannot listen at {place.address}:{place.port}: {error}; set "
                            "CUPY_FP8_PORT, or MASTER_ADDR to an address of this host", [0]) from None
        server.listen(place.size)
        while len(found) < place.size - 1:
            server.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                late = [rank for rank in range(1, place.size) if rank not in found]
                raise RankError(f"{named(late)} did not connect in {timeout:g} s", late) from None
            try:
                rank = _greeted(peer, place, deadline)
            except RankError:
                peer.close()
                raise
            if rank is None or rank in found:
                peer.close()
            else:
                found[rank] = peer
    gone = [rank for rank, peer in found.items() if not _sent(peer, _ALL, 0, b"", deadline + _SLACK)]
    if gone:
        raise RankError(f"{named(gone)} ended while the others connected", gone)


def _greeted(peer: socket.socket, place: Place, deadline: float) -> int | None:
    """Return the rank of a peer; None if it is not another rank of this job."""
    try:
        _tune(peer)
        soon = min(deadline, time.monotonic() + _HELLO_SECONDS)
        magic, version, token, rank, size = _HELLO.unpack(_exactly(peer, _HELLO.size, soon))
    except (OSError, EOFError):
        return None
    if (magic, version, token) != (_MAGIC, _VERSION, place.token) or not 0 < rank < place.size:
        return None
    if size != place.size:
        raise RankError(f"rank {rank} was started for {size} ranks, rank 0 for {place.size}", [rank])
    return int(rank)


def _connect(place: Place, timeout: float) -> socket.socket:
    """Connect to rank 0, which may start later."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            server = socket.create_connection((place.address, place.port), 1.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(f"rank 0 does not listen at {place.address}:{place.port}: {error}", [0]
                                ) from None
            time.sleep(0.02)
    try:
        _tune(server)
        server.sendall(_HELLO.pack(_MAGIC, _VERSION, place.token, place.rank, place.size))
        _receive(server, 0, deadline + _SLACK)
    except (OSError, EOFError, ValueError) as error:
        server.close()
        raise RankError(f"rank 0 at {place.address}:{place.port} has turned rank {place.rank} away, or not "
                        f"all ranks came ({error}); do all belong to one job, with as many ranks?", [0]
                        ) from None
    return server


def _tune(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# ---- records ----
def _send(peer: socket.socket, kind: int, call: int, value: bytes, deadline: float) -> None:
    peer.settimeout(max(1e-3, deadline - time.monotonic()))
    peer.sendall(_VALUE.pack(kind, call, len(value)) + value)


def _sent(peer: socket.socket, kind: int, call: int, value: bytes, deadline: float) -> bool:
    try:
        _send(peer, kind, call, value, deadline)
    except OSError:
        return False
    return True


def _receive(peer: socket.socket, call: int, deadline: float) -> bytes:
    """Receive the value of a call. Raises OSError, EOFError, and ValueError for another call's."""
    kind, number, length = _VALUE.unpack(_exactly(peer, _VALUE.size, deadline))
    if length > _MOST_BYTES:
        raise ValueError(f"a record of {length} bytes")
    value = _exactly(peer, length, deadline)
    if kind == _FAILED:
        raise _Refused(value)
    if number != call:
        raise ValueError(f"call number {number}, expected {call}")
    return value


def _exactly(peer: socket.socket, count: int, deadline: float) -> bytes:
    parts, left = [], count
    while left:
        peer.settimeout(max(1e-3, deadline - time.monotonic()))
        part = peer.recv(min(left, 1 << 20))
        if not part:
            raise EOFError("the connection has ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
