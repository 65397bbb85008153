"""Every fault of tests/support/mutations.py has its place in the kernels.

The tests that plant faults are full ones. This quick one shows that a fault must follow an edit of a kernel.
"""

import pytest
from mutations import EQUIVALENT, FAULTS

from cupy_fp8.kernels import sources


@pytest.mark.parametrize("fault", [*FAULTS.values(), EQUIVALENT], ids=lambda fault: fault.file)
def test_the_text_occurs_once(fault):
    text = (sources.root() / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, "choose another text in tests/support/mutations.py"
