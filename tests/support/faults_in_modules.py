"""Faults to plant in Python modules, each where the module is imported (mutations.py)."""

from faults import Fault

MODULE_FAULTS = (
    # ---- calls ----
    Fault("calls/memory.py", "read_end = max(read_end, end)", "read_end = end",
          test="tests/contract/test_ranges.py"),
)
