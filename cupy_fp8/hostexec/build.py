"""Compile the runtime and kernels with g++; keep the results on disk.

A kernel is compiled in two steps: ``g++ -E`` with the shim in front, then the preprocessed text with CUDA's
``__shared__`` rewritten into C++. Working on preprocessed text covers included headers, and its line markers
make every message name the real file.
"""

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
RUNTIME = HERE / "runtime"
MODES = ("fast", "asan", "tsan")
# Sources are UTF-8 whatever the locale; other bytes, as in names of folders, pass unchanged.
_ENCODING: Any = {"encoding": "utf-8", "errors": "surrogateescape"}
_TEXT: Any = {"text": True, **_ENCODING}

_COMMON = ["-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
# Contraction is off so that a * b + c keeps its two roundings. Sibling calls are off since the runtime reads
# the caller's address for its messages. From -fno-tree-pta on, the flags disable passes of the optimiser that
# cost time and gain nothing: without the first two kernels compile a sixth faster with AddressSanitizer,
# without the others another fifth faster, and they run as fast.
_KERNEL_FLAGS = [
    "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-exceptions",
    "-fno-rtti", "-fno-threadsafe-statics", "-fno-optimize-sibling-calls", "-Wno-unknown-pragmas",
    "-Wno-attributes", "-fno-tree-pta", "-fno-tree-dominator-opts",
    "-fno-if-conversion", "-fno-if-conversion2", "-fno-guess-branch-probability", "-fno-reorder-blocks",
    "-fno-shrink-wrap", "-fno-cprop-registers", "-fno-dse", "-fno-tree-dse", "-fno-tree-sink",
    "-fno-branch-count-reg", "-fno-caller-saves", "-fno-combine-stack-adjustments", "-fno-compare-elim",
    "-fno-split-wide-types",
]  # fmt: skip
_UNDEFINED = ["-fsanitize=undefined,float-cast-overflow,bounds-strict,alignment", "-fno-sanitize-recover=all"]
# -O1 compiles a quarter faster than -O2, and small tests run as fast. (With -Og, accesses beyond shared
# memory of templates are not found.) -g1 has the functions and lines that reports need; with sanitizers -g
# takes half as long again to compile. AddressSanitizer's checks compile a quarter faster as calls than
# inline, and with one region for the register allocator.
_MODE_FLAGS = {
    "fast": ["-O1", "-g1"],
    "asan": [
        "-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address", *_UNDEFINED,
        "--param=asan-instrumentation-with-call-threshold=0", "-fira-region=one",
    ],
    "tsan": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=thread", "-DHOST_TSAN"],
}
# Where several threads run blocks, each needs its own shared memory. AddressSanitizer puts red zones only
# around plain statics, so there the variables are plain, and a linker script gathers them so that they can be
# found (-fdata-sections gives each its own input section, named after its function).
_SHARED = {"fast": "static thread_local", "asan": "static", "tsan": "static thread_local"}
_SHARED_SECTION = """SECTIONS {
  host_shared (NOLOAD) : {
    PROVIDE_HIDDEN(host_shared_begin = .); KEEP(*(.bss._ZZ*)) PROVIDE_HIDDEN(host_shared_end = .);
  }
} INSERT AFTER .bss;
"""
_EXPORT = {
    "static": """
extern "C" char host_shared_begin[], host_shared_end[];
extern "C" __attribute__((visibility("default"))) const HostKernel host_kernel;
const HostKernel host_kernel = {
    host_call_kernel, sizeof(HostKernelParams), nullptr, host_shared_begin, host_shared_end};
""",
    "static thread_local": """
static thread_local char host_anchor;
static void* host_find_anchor() { return &host_anchor; }
extern "C" __attribute__((visibility("default"))) const HostKernel host_kernel;
const HostKernel host_kernel = {
    host_call_kernel, sizeof(HostKernelParams), host_find_anchor, nullptr, nullptr};
""",
}


_CHOOSE_FOLDER = "set CUPY_FP8_CACHE_DIR to a folder where files can be written"


class HostError(RuntimeError):
    """A kernel could not be compiled or run on the CPU, or did something that a GPU would not allow."""


def compiler() -> list[str]:
    """The compiler command: $CXX, which may have arguments of its own ("ccache g++ -m64"), else g++.
    """
    chosen = os.environ.get("CXX", "").strip() or "g++"
    if shutil.which(chosen):            # a path may contain spaces
        return [chosen]
    try:
        return shlex.split(chosen)
    except ValueError as error:
        raise HostError(f"CXX is not a command ({error}): {chosen}; "
                        "set it to a compiler, such as g++") from None


def cache_dir() -> Path:
    """The folder of compiled kernels: $CUPY_FP8_CACHE_DIR, else the user's cache directory."""
    if chosen := os.environ.get("CUPY_FP8_CACHE_DIR"):
        return Path(chosen) / "host"
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise HostError(f"no folder for compiled kernels ({error}): {_CHOOSE_FOLDER}") from None
    return Path(base) / "cupy_fp8" / "host"


def make_cache_dir() -> Path:
    """Create the cache's folder if it does not exist. It may be read-only if it has all kernels."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"the folder for compiled kernels cannot be made ({error}): "
                        f"{_CHOOSE_FOLDER}") from None
    return folder


def _scratch_dir() -> Path:
    folder = make_cache_dir()
    try:
        return Path(tempfile.mkdtemp(prefix=".build-", dir=folder))
    except OSError as error:
        raise HostError(f"no compiled kernel can be written ({error}): {_CHOOSE_FOLDER}") from None


def clean_environment() -> dict[str, str]:
    """The environment for compilers: a preloaded sanitizer would check g++ itself."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@functools.cache
def compiler_version() -> str:
    """The compiler's version text, and the arguments in CXX. With another compiler kernels are compiled
    anew."""
    command = compiler()
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, env=clean_environment(), **_TEXT)
    except OSError as error:
        raise HostError(f"the host executor needs g++ ({error}); install it or set CXX") from None
    if done.returncode:
        raise HostError(f"{shlex.join(command)} --version failed:\n{done.stderr}")
    return shlex.join([done.stdout, *command[1:]]) if command[1:] else done.stdout


def digest(*parts: object) -> str:
    """A short hash of texts, paths (their contents) and lists of them."""
    state = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, (list, tuple)):
            for item in part:
                add(item)
            state.update(b"]")
            return
        data = part.read_bytes() if isinstance(part, Path) else str(part).encode(**_ENCODING)
        state.update(len(data).to_bytes(8, "little") + data)

    add(parts)
    return state.hexdigest()[:20]


def source_files(*directories: Path) -> list[Path]:
    """All files below the directories, in a fixed order."""
    return [path for directory in directories for path in sorted(directory.rglob("*")) if path.is_file()]


def _run_compiler(command: Sequence[object]) -> str:
    # With the program's path and close_fds=False, subprocess uses posix_spawn, which copies no page tables.
    # (Python's own descriptors close at an exec anyway.) ThreadSanitizer turns vfork into fork, which would
    # copy the page tables of its shadow memory and take as long as compiling.
    program = shutil.which(str(command[0])) or command[0]
    done = subprocess.run([str(part) for part in (program, *command[1:])], capture_output=True,
                          env=clean_environment(), close_fds=False, **_TEXT)
    if done.returncode:
        message = done.stderr.strip().encode(**_ENCODING).decode("utf-8", "replace")
        raise HostError(f"{command[0]} failed:\n{message}")
    return done.stdout


_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)    # their holders continue in the parent


@contextmanager
def _other_processes_wait(target: Path) -> Iterator[None]:
    """Within this context other processes that want to make the same file wait, if the file system supports
    locks. The lock is on a file beside it, which is removed afterwards: a waiting process then finds the
    target, or makes it."""
    import fcntl  # not on Windows, which compiles no kernel

    lock = target.with_name(f".lock-{target.name}")
    with open(lock, "wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):                 # a fork while this ran has the file open too
                fcntl.flock(file, fcntl.LOCK_UN)


def _build_into(target: Path, make: Callable[[Path], Path]) -> Path:
    """Make a file in a temporary directory and move it to `target` atomically, so that other processes never
    see a part of it. Others that want the same file wait: threads of this process and other processes."""
    with _locks[target]:
        if target.exists():
            return target
        scratch = _scratch_dir()           # its error message says what to do if the folder cannot be written
        try:
            with _other_processes_wait(target):
                if not target.exists():
                    os.replace(make(scratch), target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target


def build_runtime(mode: str) -> Path:
    """Build the runtime library for one mode. It is never instrumented; it only tells the sanitizer about
    fibers.
    """
    flags = ["-std=c++20", "-O2", "-g1", *_COMMON]
    flags += {"fast": [], "asan": ["-DHOST_ASAN"], "tsan": ["-DHOST_TSAN"]}[mode]
    if os.environ.get("CUPY_FP8_HOST_UCONTEXT"):
        flags.append("-DHOST_UCONTEXT")
    key = digest(compiler_version(), flags, source_files(RUNTIME, SHIM))

    def make(scratch: Path) -> Path:
        library = scratch / "runtime.so"
        _run_compiler([*compiler(), *flags, *sorted(RUNTIME.glob("*.cpp")), "-o", library, "-ldl"])
        return library

    return _build_into(cache_dir() / f"runtime-{mode}-{key}.so", make)


_ALIGNMENT = r"(?:\s*(?:alignas\s*\([^()]*\)|__attribute__\s*\(\(\s*aligned\s*\([^()]*\)\s*\)\)))*"
_DYNAMIC_SHARED = re.compile(
    rf"\bextern\s+__shared__{_ALIGNMENT}\s*([^;=(){{}}]*?){_ALIGNMENT}\s*(\w+)\s*\[\s*\]\s*;")
_STATIC_SHARED = re.compile(r"\b(?:static\s+)?__shared__((?:\s*alignas\s*\([^()]*\))*)")


def rewrite_shared(text: str, storage: str) -> str:
    """Turn CUDA's __shared__ declarations in preprocessed text into C++ ones, line for line."""

    def dynamic(match: re.Match[str]) -> str:
        # The statement expression makes a declaration outside a function an error: it would bind before the
        # memory exists.
        lines = "\n" * match[0].count("\n")
        return (f"{match[1]} (&{match[2]})[] = "
                f"*({{ reinterpret_cast<{match[1]} (*)[]>(host_block.dynamic_shared); }});{lines}")

    return _STATIC_SHARED.sub(rf"\1 {storage}", _DYNAMIC_SHARED.sub(dynamic, text))


def build_kernel(path: Path, entry: str, defines: dict[str, str], include_dirs: tuple[Path, ...],
                 mode: str) -> Path:
    """Build the shared library of one kernel entry point."""
    runtime = build_runtime(mode)
    storage = _SHARED[mode]
    flags = [*_COMMON, *_KERNEL_FLAGS, *_MODE_FLAGS[mode]]
    options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    options += [f"-I{directory}" for directory in include_dirs]
    unit = (f'#include "{SHIM / "cuda_host.h"}"\n#include "{path}"\n'
            f'#line 1 "<host executor: entry point {entry}>"\n'
            f"using HostKernelParams = HostParams<decltype(&{entry})>::type;\n"
            f"static void host_call_kernel(const void* params) "
            f"{{ {entry}(*static_cast<const HostKernelParams*>(params)); }}\n" + _EXPORT[storage])
    files = [Path(__file__), path, *source_files(SHIM, *include_dirs)]
    key = digest(compiler_version(), flags, options, unit, str(runtime), files)

    def make(scratch: Path) -> Path:
        source, preprocessed, library, script = (
            scratch / name for name in ("unit.cpp", "unit.ii", "kernel.so", "shared.ld"))
        source.write_text(unit, **_ENCODING)
        text = _run_compiler([*compiler(), "-E", *flags, *options, source])
        preprocessed.write_text(rewrite_shared(text, storage), **_ENCODING)
        link: list[object] = [runtime, "-lm"]
        if storage == "static":
            script.write_text(_SHARED_SECTION)
            link += ["-fdata-sections", f"-Wl,-T,{script}"]
        _run_compiler([*compiler(), *flags, "-fpreprocessed", preprocessed, "-o", library, *link])
        return library

    return _build_into(cache_dir() / f"{path.stem}-{entry}-{mode}-{key}.so", make)
