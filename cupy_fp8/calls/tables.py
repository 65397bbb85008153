"""Tables: records in device memory that launches read, one record per array of a list.

A table belongs to the memory of the result that its launches write: a CUDA graph that captured these launches
reads the table for as long as that result lives. Tables that no graph has captured may be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from .. import backend
from ..arrays import Array, address, empty_beside
from ..kernels import OwnedMemory, capturing

_MOST = 4                               # most uncaptured tables per result


class Records(bytes):
    """Table bytes, or bytes of records passed as kernel arguments. Equal bytes make equal launches."""

    pointers: Sequence[int]             # the u64 words that are addresses of arrays
    own: slice                          # the u64 words that are offsets in the table itself

    @staticmethod
    def of(data: bytes, pointers: Sequence[int] = (), own: slice = slice(0)) -> Records:
        found = Records(data)
        found.pointers, found.own = pointers, own
        return found


class DeviceTable:
    """Records in the memory of x's device."""

    captured = False                    # a graph may read it for as long as the result lives

    def __init__(self, x: Array, records: Records) -> None:
        self.records, self.device = records, None if isinstance(x, np.ndarray) else x.data.device_id
        host = np.frombuffer(records, np.uint8)
        if self.device is None or records.own.stop:
            host = host.copy()
        memory: Array = host if self.device is None else empty_beside(x, host.shape, host.dtype)
        self.memory: Array | None = memory              # None once another table has replaced it
        self.at = address(memory)
        self.nbytes = host.nbytes
        if records.own.stop:
            host.view(np.uint64)[records.own] += np.uint64(self.at)
        self._host: np.ndarray | None = host            # source of a copy that may be in flight
        if self.device is not None:
            cuda = backend.cupy().cuda
            with nullcontext() if self.device == cuda.runtime.getDevice() else cuda.Device(self.device):
                memory.data.copy_from_host_async(host.ctypes.data, host.nbytes)

    def use(self) -> bool:
        """Return whether a launch can read it; notes that a graph captures this launch."""
        if not self.captured and self.device is not None:
            self.captured = capturing(self.device)
        return self.memory is not None

    def free(self) -> None:
        self.memory = self._host = None
        self.records = Records.of(b"")


def table(result: Array, x: Array, records: Records, in_use: Sequence[DeviceTable] = ()) -> DeviceTable:
    """Return the table with these records that belongs to `result`, an array that the launches write.
    ValueError if it would have to be made during a capture. in_use: tables of the same call, which must not
    be replaced."""
    tables = _of_results.of(result)
    found = next((known for known in tables if known.records == records), None)
    if found is None:
        if not isinstance(x, np.ndarray) and capturing(x.data.device_id):
            raise ValueError("out: used with these arrays for the first time while a CUDA graph is "
                             "captured; call once before the capture")
        free = [known for known in tables if not known.captured and known not in in_use]
        for old in free[:1 - _MOST]:
            tables.remove(old)
            old.free()
        found = DeviceTable(x, records)
        tables.append(found)
    found.use()
    return found


def _free(tables: list[DeviceTable]) -> None:
    for each in tables:
        each.free()


_of_results: OwnedMemory[list[DeviceTable]] = OwnedMemory(list, _free)
