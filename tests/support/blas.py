"""NumPy's products use one thread, which NumPy learns when it is imported: so this module comes before it.
Tests run in as many processes as there are processors, and threads that wait for processors spin."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
