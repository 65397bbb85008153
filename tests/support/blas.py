"""Limits NumPy's BLAS to one thread; must be imported before NumPy. Tests run in one process per processor,
and threads that wait for processors spin."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
