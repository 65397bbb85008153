"""Load compiled kernels and launch them."""

import ctypes
import functools
import itertools
import math
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from . import build
from .build import HostError

_ORDERS = {"asc": 0, "desc": 1, "random": 2}
# Instrumented code needs more stack.
_STACK_BYTES = {"fast": 128 << 10, "asan": 512 << 10, "tsan": 256 << 10}
_EXIT_CODE = 66  # exit status of a child process after a sanitizer's finding


@dataclass(frozen=True)
class _Chosen:
    """The blocks of a grid that run inside `blocks_of_grid`."""

    first: int
    last: int
    around: tuple[Fraction, ...]
    each: int
    whole: frozenset[str]

    def ranges(self, total: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a grid of `total` blocks, as (begin, end): not empty, disjoint, in ascending
        order."""
        middles = [math.floor(total * place) - self.each // 2 for place in sorted(self.around)]
        wanted = ((0, self.first), *((begin, begin + self.each) for begin in middles),
                  (total - self.last, total))
        done = 0
        for begin, end in wanted:
            begin, end = max(begin, done), min(end, total)
            if begin < end:
                yield begin, end
                done = end


# None: all blocks.
_chosen: ContextVar[_Chosen | None] = ContextVar("cupy_fp8_blocks_of_grid", default=None)


class _Kernel(ctypes.Structure):  # HostKernel in shim/host_abi.h
    _fields_ = [
        ("call", ctypes.c_void_p),
        ("param_bytes", ctypes.c_size_t),
        ("shared_anchor", ctypes.c_void_p),
        ("shared_begin", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
    ]


class _Launch(ctypes.Structure):  # HostLaunch in shim/host_abi.h
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("order", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("resident", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("stack_bytes", ctypes.c_uint),
        ("ranges", ctypes.c_uint),
        ("blocks", ctypes.POINTER(ctypes.c_uint64)),
        ("params", ctypes.c_void_p),
        ("ranks", ctypes.c_uint),
        ("params_stride", ctypes.c_uint),
    ]


def available() -> str | None:
    """Return None if kernels can be run on this machine's CPU, else the reason why not."""
    try:
        build.compiler_version()
        build.make_cache_dir()
    except HostError as error:
        return str(error)
    return None if os.uname().sysname == "Linux" else "the host executor runs on Linux only"


def sanitizer_env(mode: str) -> dict[str, str]:
    """Return environment variables for a child process that runs kernels in mode "asan" or "tsan".

    A finding ends the child with exit code 66 and a report on stderr.
    """
    library = {"asan": "libasan.so", "tsan": "libtsan.so"}[mode]
    command = [*build.compiler(), f"-print-file-name={library}"]
    path = subprocess.run(command, capture_output=True, text=True,
                          env=build.clean_environment()).stdout.strip()
    if not os.path.isabs(path):
        raise HostError(f"g++ has no {library}; install its sanitizer libraries")
    env = {"LD_PRELOAD": path, "CUPY_FP8_HOST_MODE": mode, "PYTHONMALLOC": "malloc"}
    if mode == "asan":
        env["ASAN_OPTIONS"] = f"detect_leaks=0:detect_stack_use_after_return=0:exitcode={_EXIT_CODE}"
        env["UBSAN_OPTIONS"] = f"print_stacktrace=1:exitcode={_EXIT_CODE}"
    else:
        env["TSAN_OPTIONS"] = f"exitcode={_EXIT_CODE}:halt_on_error=1:report_signal_unsafe=0"
    return env


def sanitizer_command(mode: str, command: Sequence[object]) -> list[str]:
    """Return `command`, wrapped as needed on this machine for a child process in that mode.

    The ThreadSanitizer of g++ 12 does not start where the kernel randomises addresses by more than 28 bits.
    """
    randomised_bits = Path("/proc/sys/vm/mmap_rnd_bits")
    wrap = mode == "tsan" and randomised_bits.exists() and int(randomised_bits.read_text()) > 28
    return [*(["setarch", "-R"] if wrap else []), *map(str, command)]


def _check_preloaded(mode: str) -> None:
    name = {"asan": "libasan", "tsan": "libtsan"}.get(mode)
    if name and name not in Path("/proc/self/maps").read_text():
        raise HostError(f'mode "{mode}" needs a process started with the environment '
                        f'hostexec.sanitizer_env("{mode}")')


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    library.host_error.restype = ctypes.c_char_p
    return library


def _three(name: str, numbers: Iterable[int]) -> "ctypes.Array[ctypes.c_uint]":
    values = tuple(int(number) for number in numbers)
    if not 1 <= len(values) <= 3:
        raise HostError(f"{name} needs 1 to 3 numbers, not {values}")
    return (ctypes.c_uint * 3)(*values, *(1,) * (3 - len(values)))


class HostKernel:
    """One kernel, compiled for the CPU. Call it to launch it."""

    def __init__(self, library: Path, runtime: Path, entry: str, mode: str):
        self.entry, self.mode, self.library = entry, mode, library
        self._runtime = _load_runtime(runtime)
        try:
            self._dll = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
        except OSError as error:
            raise HostError(f"{entry}: {error}") from None
        self._kernel = _Kernel.in_dll(self._dll, "host_kernel")
        self.param_bytes: int = self._kernel.param_bytes

    def __call__(self, grid: Iterable[int], block: Iterable[int], params: bytes, *, shared_mem: int = 0,
                 order: str | None = None, seed: int | None = None, resident: bool | None = None,
                 cluster: int = 1, ranks: Sequence[bytes] | None = None) -> None:
        """Run the kernel and wait for it.

        order: the order of threads and blocks, "asc", "desc" or "random" (by `seed`); the default is
        $CUPY_FP8_HOST_ORDER and $CUPY_FP8_HOST_SEED, else "random" and 0. resident: all blocks are alive at
        the same time, for kernels whose blocks wait for each other. cluster: this many neighbouring blocks
        are resident together and can write to one another's shared memory; one cluster runs after the other.
        """
        blocks, threads = _three("grid", grid), _three("block", block)
        if not 1 <= threads[0] * threads[1] * threads[2] <= 1024:
            raise HostError(f"{self.entry}: a block has 1 to 1024 threads, not {tuple(threads)}")
        if not all(blocks) or blocks[0] > 0x7FFFFFFF or blocks[1] > 65535 or blocks[2] > 65535:
            raise HostError(f"{self.entry}: a grid has 1..2147483647 x 1..65535 x 1..65535 blocks, not "
                            f"{tuple(blocks)}")
        if not 0 <= shared_mem <= 227 << 10:
            raise HostError(f"{self.entry}: a block has at most 227 KiB of shared memory, not {shared_mem} "
                            f"bytes")
        every = [bytes(params)] if ranks is None else [bytes(p) for p in ranks]
        for params in every:
            if len(params) != self.param_bytes:
                raise HostError(f"{self.entry}: {len(params)} bytes of parameters given, the kernel's struct "
                                f"has {self.param_bytes}")
        order = order or os.environ.get("CUPY_FP8_HOST_ORDER", "random")
        if order not in _ORDERS:
            raise HostError(f"order must be one of {', '.join(_ORDERS)}, not {order!r}")
        if seed is None:
            seed = int(os.environ.get("CUPY_FP8_HOST_SEED", "0"))
        stride = (self.param_bytes + 255) & ~255
        memory = ctypes.create_string_buffer(stride * len(every) + 256)
        address = (ctypes.addressof(memory) + 255) & ~255
        for i, params in enumerate(every):
            ctypes.memmove(address + i * stride, params, len(params))
        resident = bool(resident) or cluster > 1 or ranks is not None
        schedule = (_ORDERS[order], seed & 0xFFFFFFFF, _workers(), resident, cluster if cluster > 1 else 0,
                    _STACK_BYTES[self.mode])
        ranges = self._ranges(math.prod(blocks) * len(every), resident)
        firsts_and_counts = (ctypes.c_uint64 * (2 * len(ranges)))(
            *(number for begin, end in ranges for number in (begin, end - begin)))
        launch = _Launch(blocks, threads, shared_mem, *schedule, len(ranges), firsts_and_counts, address,
                         len(every), stride)
        if self._runtime.host_launch(ctypes.byref(self._kernel), ctypes.byref(launch)):
            raise HostError(f"{self.entry}: {self._name_places(self._runtime.host_error().decode())}")

    def _ranges(self, total: int, resident: bool) -> list[tuple[int, int]]:
        """Return the ranges of blocks that run, of a grid of `total`."""
        chosen = _chosen.get()
        if chosen is None or self.entry in chosen.whole:
            return [(0, total)]
        ranges = list(chosen.ranges(total))
        if resident and sum(end - begin for begin, end in ranges) < total:
            raise HostError(f"{self.entry}: blocks of a resident grid wait for each other; blocks_of_grid "
                            f"cannot leave any out")
        return ranges

    def _name_places(self, message: str) -> str:
        """Replace the addresses in a message by file:line, innermost first."""

        def name(match: re.Match[str]) -> str:
            command = ["addr2line", "-i", "-e", str(self.library), hex(int(match[1], 16) - 1)]
            try:
                lines = subprocess.run(command, capture_output=True, text=True,
                                       env=build.clean_environment()).stdout.split("\n")
            except OSError:
                return match[0]
            ours = re.compile(rf"^$|[?]|<host executor|^{re.escape(str(build.SHIM))}")
            places = [line.split(" (")[0] for line in lines if not ours.search(line)]
            return " called from ".join(places) or match[0]

        return re.sub(r"<pc (0x[0-9a-f]+)>", name, message)


@contextmanager
def blocks_of_grid(*, first: int, last: int, around: Sequence[Fraction] = (), each: int = 0,
                   whole: Iterable[str] = ()) -> Iterator[None]:
    """Within this context, launches of this thread run only `first` and `last` blocks at the beginning and
    end of their grid, and `each` blocks around each of the places `around`, given as fractions of the grid.
    All blocks run of the kernels named in `whole`: those whose last block writes what all blocks have found.

    A test of indices beyond 2**31 then takes the time of a few blocks, and only the memory that these blocks
    touch of what is mapped. Raises ValueError unless the numbers are 0 or more and the places in [0, 1].
    """
    if min(first, last, each) < 0:
        raise ValueError(f"first, last, each: expected numbers of blocks, 0 or more, got {first}, {last} and "
                         f"{each}")
    if not all(0 <= place <= 1 for place in around):
        raise ValueError(f"around: expected shares of a grid, 0 to 1, got {', '.join(map(str, around))}")
    token = _chosen.set(_Chosen(first, last, tuple(around), each, frozenset(whole)))
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _workers() -> int:
    return int(os.environ.get("CUPY_FP8_HOST_THREADS") or _processors())


_compiled: dict[tuple[object, ...], HostKernel] = {}
# For folders of included files: time of the last check, and the stamps then.
_seen: dict[tuple[Path, ...], tuple[float, tuple[tuple[str, int, int], ...]]] = {}
SECONDS_BETWEEN_LOOKS = 1.0


def _stamps(directory: str) -> Iterator[tuple[str, int, int]]:
    """Yield values that change when a file below does, in less time than Path.rglob takes."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _stamps(entry.path)
            elif entry.is_file():
                stat = entry.stat()
                yield entry.path, stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=1024)
def _real_path(path: str) -> Path:
    return Path(path).resolve()


def _current_stamps(directories: tuple[Path, ...]) -> tuple[tuple[str, int, int], ...]:
    """Return the stamps; cached, since every launch asks for them, and looking takes longer than a small
    launch."""
    now = time.monotonic()
    seen, stamps = _seen.get(directories, (-math.inf, ()))
    if now - seen >= SECONDS_BETWEEN_LOOKS:
        stamps = tuple(sorted(itertools.chain.from_iterable(map(_stamps, map(str, directories)))))
        _seen[directories] = now, stamps
    return stamps


def compile_kernel(path: str | os.PathLike[str], entry: str, *, defines: Mapping[str, object] | None = None,
                   include_dirs: Iterable[str | os.PathLike[str]] = (),
                   mode: str | None = None) -> HostKernel:
    """Compile one entry point of a .cu file for the CPU.

    defines: preprocessor names and values. mode: "fast", "asan" or "tsan" (default: $CUPY_FP8_HOST_MODE, else
    "fast"). The result is kept in memory and on disk until one of the files, this one or those in
    `include_dirs`, changes (of those, which is noticed within a second).
    """
    mode = mode or os.environ.get("CUPY_FP8_HOST_MODE") or "fast"
    if mode not in build.MODES:
        raise HostError(f"mode must be one of {', '.join(build.MODES)}, not {mode!r}")
    source = _real_path(os.path.abspath(path))
    if not entry.isidentifier():
        raise HostError(f"entry must be the name of a kernel, not {entry!r}")
    directories = tuple(_real_path(os.path.abspath(directory)) for directory in include_dirs)
    macros = {str(name): str(value) for name, value in (defines or {}).items()}
    if not os.path.isfile(source):
        raise HostError(f"no such kernel source: {source}")
    stat = os.stat(source)
    stamps = source, stat.st_mtime_ns, stat.st_size, *_current_stamps(directories)
    key = (entry, mode, tuple(sorted(macros.items())), directories, stamps,
           os.environ.get("CUPY_FP8_HOST_UCONTEXT"))
    if key not in _compiled:
        _check_preloaded(mode)
        library = build.build_kernel(source, entry, macros, directories, mode)
        _compiled[key] = HostKernel(library, build.build_runtime(mode), entry, mode)
    return _compiled[key]
