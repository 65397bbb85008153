"""NumPy or CuPy: finds which of the two an array belongs to, and whether there is a GPU. CuPy is imported
only when needed."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

import numpy as np

from .advice import array_instead, shown, type_name

__all__ = ["DeviceError", "default_module", "gpu_problem"]

NUMPY_WARNING_BYTES = 64 << 20
_PACKAGE = os.path.dirname(os.path.abspath(__file__))


class DeviceError(RuntimeError):
    """The machine cannot do what was asked: no CuPy, no GPU, or a GPU older than compute capability 8.0."""


def free_in_children(lock: Any) -> Any:
    """Return the lock, registered to be free after a fork: a child would wait for ever for its parent's
    thread."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


INSTALL_HINT = "pip install 'cupy-cuda13x[ctk]>=14.2' (CUDA 13 driver) or 'cupy-cuda12x[ctk]>=14.2' (CUDA 12)"


@functools.cache
def cupy() -> Any:
    """Return the cupy module. Raises DeviceError with the line that installs it."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy is not installed ({error}): {INSTALL_HINT}") from None
    return cupy


@functools.cache
def gpu_problem() -> str | None:
    """Return why kernels cannot run on a GPU here, or None if they can."""
    try:
        cp = cupy()
    except DeviceError as error:
        return str(error)
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        return f"no usable NVIDIA GPU: {error}"
    if count == 0:
        return "no NVIDIA GPU is visible"
    return None


@functools.cache
def check_device(device_id: int) -> None:
    """Raise DeviceError unless device `device_id` can run the kernels."""
    problem = gpu_problem()
    if problem:
        raise DeviceError(problem)
    capability = cupy().cuda.Device(device_id).compute_capability
    if int(capability) < 80:
        raise DeviceError(f"GPU {device_id} has compute capability {int(capability) / 10}; the kernels need "
                          "8.0 or later (pass NumPy arrays to use the reference)")


def default_module() -> Any:
    """Return the module `cupy_fp8.xp`: CuPy if there is a GPU, else NumPy."""
    return np if gpu_problem() else cupy()


def module_of(a: Any, name: str = "x", dtype: str = "float32", dimensions: int = 0) -> Any:
    """Return numpy or cupy, by the type of `a`. TypeError, which names the argument, for any other object.
    dtype, dimensions: of the array that the message says how to make (see `advice.array_instead`)."""
    if type(a) is np.ndarray:
        return np
    cp = sys.modules.get("cupy")
    if cp is not None and isinstance(a, cp.ndarray):
        return cp
    if isinstance(a, np.ndarray) and not isinstance(a, np.ma.MaskedArray):
        return np
    raise TypeError(f"{name}: expected a numpy.ndarray or cupy.ndarray, got {type_name(a)}"
                    f"{array_instead(a, name, dtype, dimensions)}")


def kind_of(a: Any) -> str:
    return str(module_of(a).__name__)


def require_module(a: Any, xp: Any, name: str, dtype: str = "float32", dimensions: int = 0) -> None:
    """Raise TypeError unless `a` is an array of module `xp`. dtype, dimensions: as for `module_of`."""
    if type(a) is not xp.ndarray and (given := module_of(a, name, dtype, dimensions)) is not xp:
        raise TypeError(f"{name}: a {given.__name__} array among {xp.__name__} arrays; "
                        f'cupy_fp8.asarray({name}, like="{xp.__name__}") moves it')


def same_device(a: Any, other: Any, name: str, of: str = "the input") -> None:
    """Raise ValueError unless two CuPy arrays are on one GPU. of: the other array's name."""
    if a.data.device_id != other.data.device_id:
        there = other.data.device_id
        raise ValueError(f"{name}: on GPU {a.data.device_id}, {of} is on GPU {there}; "
                         f"`with cupy.cuda.Device({there}): {name}.copy()` copies it there")


def like_module(like: Any) -> Any:
    """Return the module for `like`: None (the default), 'numpy'/'cupy', one of the two modules, or an
    array."""
    if like is None:
        return default_module()
    if like is np or (isinstance(like, str) and like == "numpy"):
        return np
    if isinstance(like, str) and like == "cupy":
        return _usable_cupy()
    if like is sys.modules.get("cupy"):
        return _usable_cupy()
    try:
        return module_of(like)
    except TypeError:
        raise TypeError("like: expected 'numpy', 'cupy', one of these modules or an array, got "
                        f"{shown(like)}") from None


def _usable_cupy() -> Any:
    cp = cupy()
    problem = gpu_problem()
    if problem:
        raise DeviceError(problem)
    return cp


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the user's line that called the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@functools.cache
def _warn_once() -> None:
    warn("a NumPy array above 64 MB was given on a machine with a GPU: the NumPy reference runs on the CPU; "
         "cupy_fp8.asarray(x, like='cupy') moves it to the GPU (this warning appears once)")


def note_large_numpy(x: np.ndarray) -> None:
    if x.nbytes > NUMPY_WARNING_BYTES and gpu_problem() is None:
        _warn_once()
