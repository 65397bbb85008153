"""Repeated calls with the same memory: what else their keys must distinguish, and what is checked again."""

from __future__ import annotations

import numpy as np
import pytest
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing

pytestmark = needs_host


@pytest.mark.parametrize("with_out", [False, True])
def test_a_square_and_its_transpose_in_numpy(with_out):
    """They have the same memory, shape and dtype: only the strides differ."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 64), np.float32)
    with testing.executor("host"):
        out = fp8.quantize_mx(x) if with_out else None
        for view in (x, x.T, x, x.T):
            x[...] = rng.standard_normal(x.shape)
            testing.assert_bytes_equal(fp8.quantize_mx(view, out=out), reference.quantize_mx(view))


def test_an_argument_that_is_copied_is_copied_in_every_call():
    rng, wide = np.random.default_rng(0), np.empty((64, 128), np.float32)
    with testing.executor("host"):
        out = fp8.quantize_tensor(wide[:, ::2], 2.0)
        for _ in range(4):
            wide[...] = rng.standard_normal(wide.shape)
            want = reference.quantize_tensor(wide[:, ::2], 2.0)
            testing.assert_bytes_equal(fp8.quantize_tensor(wide[:, ::2], 2.0, out=out), want)


def test_a_result_inside_an_argument_that_others_lie_in():
    """A read range within another does not hide the rest of the outer one."""
    memory = np.ones(4096, np.float32)
    x, scale, out = memory[:2048].reshape(16, 128), memory[4:5], memory[1024:1536]
    result = fp8.Quantized(fp8.Scaled(out.view(fp8.float8_e4m3fn).reshape(16, 128), np.ones(1, np.float32),
                                      (16, 128)))
    with testing.executor("host"), pytest.raises(ValueError, match=r"^out\.rowwise\.data: overlaps x in mem"):
        fp8.quantize_tensor(x, scale, out=result)


def test_sizes_on_the_host_are_examined_in_every_call():
    x, splits = np.ones((48, 64), np.float32), np.array([16, 32])
    with testing.executor("host"):
        out = fp8.group_quantize(x, splits, fp8.MXScaling())
        for _ in range(2):
            fp8.group_quantize(x, splits, fp8.MXScaling(), out=out)
        splits[0] = 17
        with pytest.raises(ValueError, match=r"^splits: expected sizes that add up to at most the 48 rows"):
            fp8.group_quantize(x, splits, fp8.MXScaling(), out=out)


@pytest.mark.parametrize("zero", [0.0, np.float32(0)], ids=["Python", "NumPy"])
def test_zeros_of_both_signs(zero):
    x = np.ones((4, 16), np.float32)
    with testing.executor("host"):
        out = fp8.quantize_tensor(x, 1.0)
        for scale in (zero, -zero, zero):
            want = reference.quantize_tensor(x, scale)
            testing.assert_bytes_equal(fp8.quantize_tensor(x, scale, out=out), want)


def test_an_amax_made_read_only():
    x, amax = np.ones((4, 16), np.float32), np.zeros(1, np.float32)
    with testing.executor("host"):
        out = fp8.quantize_tensor(x, 2.0, amax=amax)
        fp8.quantize_tensor(x, 2.0, amax=amax, out=out)
        amax.flags.writeable = False
        with pytest.raises(ValueError, match=r"^amax: the array is read-only$"):
            fp8.quantize_tensor(x, 2.0, amax=amax, out=out)


# ---- on a device ----
@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling(), fp8.MXScaling()], ids=str)
def test_a_square_and_its_transpose(recipe, device):
    """They have the same memory, shape and dtype."""
    host = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    x = device.array(host)
    for _ in range(2):
        for view, of_host in ((x, host), (x.T, host.T)):
            testing.assert_bytes_equal(device.run.numpy(recipe.quantize(view)), recipe.quantize(of_host))


def test_an_argument_that_is_updated_and_now_overlaps_another(device):
    """Calls that allocate check new addresses too, if something else than the result is written."""
    x, amax = device.array(np.ones((16, 32), np.float32)), device.array(np.zeros(1, np.float32))
    for _ in range(2):
        fp8.cast_transpose(x, 1.0, amax=amax)
    with pytest.raises(ValueError, match="amax: overlaps x"):
        fp8.cast_transpose(x, 1.0, amax=x.reshape(-1)[:1])
