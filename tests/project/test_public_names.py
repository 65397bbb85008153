"""What `dir` and `import *` show: the public names and nothing else."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

import cupy_fp8 as fp8

MODULES = ("arrays", "backend", "cache", "diagnostics", "distributed", "dlpack", "formats", "grouped", "io",
           "layouts", "plot", "recipes", "reference", "results", "routing", "kernels", "state", "testing")


def shown(module: ModuleType) -> list[str]:
    return [name for name in dir(module) if not name.startswith("__")]


def test_the_package_shows_its_names():
    assert shown(fp8) == sorted([*fp8.__all__, "xp", "testing", "reference"])
    assert {"__version__", "__doc__", "__file__", "__path__"} <= set(dir(fp8))
    for name in dir(fp8):
        assert getattr(fp8, name) is not None or name.startswith("__")


@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_says_what_is_public(name):
    module = import_module(f"cupy_fp8.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), public
        assert not public.startswith("_")


@pytest.mark.parametrize("name", ["diagnostics", "distributed", "io", "plot", "testing"])
def test_modules_that_users_browse_show_their_names(name):
    module = getattr(fp8, name)
    assert shown(module) == sorted(module.__all__)
    assert {"__doc__", "__file__"} <= set(dir(module))
    for public in module.__all__:
        value = getattr(module, public)
        home = f"{getattr(value, '__module__', module.__name__)}."
        assert home.startswith(f"{module.__name__}.")


def test_what_the_package_exports_is_exported_where_it_is_made():
    for name in fp8.__all__:
        value = getattr(fp8, name)
        home = getattr(value, "__module__", "")
        has_home = home.count(".") == 1 and home.startswith("cupy_fp8.")
        if has_home and not isinstance(value, (ModuleType, np.dtype)):
            assert name in import_module(home).__all__, name
