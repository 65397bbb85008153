"""Run the project's CUDA kernels on the CPU, so that tests need no GPU.

The unchanged ``.cu`` file is compiled with g++ against a small header (``shim/``) and run by a small library
(``runtime/``). The threads of a block are fibers, switched only at barriers, warp collectives and polls, in
ascending, descending or seeded random order; blocks run in that kind of order too. Shared memory starts as
0xFF. Asynchronous copies land as late as they may.

    cast = hostexec.compile_kernel("kernels_cu/quantize/tensor.cu", "cast",
                                   defines={"IN": "bf16", "OUT": "e4m3fn"},
                                   include_dirs=["kernels_cu/include"])
    cast((blocks,), (256,), params, shared_mem=0)

Inside ``blocks_of_grid(first=2, last=2)`` only those blocks run, for arrays too large for all of them; with
``around=`` also blocks in between.

Modes: "fast"; "asan" (AddressSanitizer and UndefinedBehaviorSanitizer: bounds, alignment, overflow); "tsan"
(ThreadSanitizer: threads or blocks without an order). The last two need a process of their own:

    env = os.environ | hostexec.sanitizer_env("tsan")
    subprocess.run(hostexec.sanitizer_command("tsan", [sys.executable, "-m", "pytest"]), env=env)

Environment: CUPY_FP8_HOST_MODE, _ORDER, _SEED choose what the arguments leave open; _THREADS limits the
threads of the fast mode; _UCONTEXT=1 forces the portable context switch; CUPY_FP8_CACHE_DIR holds the
compiled libraries; CXX is the compiler.

Not supported: tensor maps and matrix instructions (kernels have a branch of their own instead), and
approximate functions (a kernel that calls __expf does not compile). Subnormals are not flushed (CuPy compiles
with -ftz=true, so kernels use the PTX wrappers). Of CUDA's exact functions and vector types ``shim/`` has
those that the package's kernels and tests use; add further ones there. A loop that polls must call
host_yield(). A load by __ldg, or a store of a vector, at an address that is no multiple of its size is an
error in every mode, as on a GPU. A barrier counts every thread of the block, so an early return before one is
an error here even where a GPU lets it pass.
"""

from .build import HostError
from .executor import HostKernel, available, blocks_of_grid, compile_kernel, sanitizer_command, sanitizer_env

__all__ = ["HostError", "HostKernel", "available", "blocks_of_grid", "compile_kernel", "sanitizer_command",
           "sanitizer_env"]
