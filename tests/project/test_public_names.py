"""`dir` and `import *` show the public names and nothing else."""

from __future__ import annotations

import inspect
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


def test_transposed_has_one_default():
    """Column-wise data are stored transposed, except MX (docs/numerics.md, section 1). A Scaled is one
    direction, and states how its data are stored."""
    defaults = {}
    for name in fp8.__all__:
        value = getattr(fp8, name)
        if inspect.isfunction(value) or hasattr(value, "__dataclass_fields__"):
            parameters = inspect.signature(value).parameters
            if "transposed" in parameters:
                defaults[name] = parameters["transposed"].default
    assert defaults == {"quantize_tensor": True, "quantize_block": True, "quantize_mx": False,
                        "Grouped": True, "Scaled": False}
    x = np.ones((64, 128), np.float32)
    for recipe in (fp8.CurrentScaling(), fp8.BlockScaling(), fp8.MXScaling()):
        made = (fp8.quantize(x, recipe, columnwise=True), fp8.multi_quantize([x], recipe, columnwise=True)[0],
                fp8.swiglu_quantize(np.ones((64, 256), np.float32), recipe, columnwise=True),
                fp8.activation_quantize(x, recipe, columnwise=True), recipe.empty(x.shape, columnwise=True),
                fp8.norm_quantize(x, x[0], recipe, columnwise=True),
                fp8.group_quantize(x, [64], recipe, columnwise=True)[0])
        assert {q.columnwise.transposed for q in made} == {not isinstance(recipe, fp8.MXScaling)}


def test_what_the_package_exports_is_exported_where_it_is_made():
    for name in fp8.__all__:
        value = getattr(fp8, name)
        home = getattr(value, "__module__", "")
        has_home = home.count(".") == 1 and home.startswith("cupy_fp8.")
        if has_home and not isinstance(value, (ModuleType, np.dtype)):
            assert name in import_module(home).__all__, name
