"""Workspaces that separate launches: by thread, size and result."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8.kernels import Launch

workspace = importlib.import_module("cupy_fp8.kernels.workspace")  # the package has a function of that name


def test_a_thread_has_a_context_before_it_launches(device, monkeypatch):
    """Also a thread whose first call is repeated with parameters packed by another thread."""
    x, out = (device.cupy.zeros(40, np.float32) for _ in range(2))
    for _ in range(2):
        fp8.astype(x, np.float32, out=out)
    runtime, made = device.cupy.cuda.runtime, []
    free = runtime.free

    def noted(at: int) -> None:
        made.append(threading.get_ident())
        free(at)

    monkeypatch.setattr(runtime, "free", noted)

    def call() -> int:
        fp8.astype(x, np.float32, out=out)
        return threading.get_ident()

    with ThreadPoolExecutor(1) as other:
        assert [other.submit(call).result() for _ in range(2)] == 2 * made[:1]
    assert len(made) == 1


def test_threads_that_share_a_stream_do_not_share_a_workspace(monkeypatch):
    """Their launches interleave: what one call's first launch leaves for its second must not be found by
    another call's."""
    monkeypatch.setattr(workspace, "current_stream", lambda device: 0)
    monkeypatch.setattr(workspace, "_zeros", lambda device, words: np.zeros(words, np.uint32))
    x: Any = SimpleNamespace(data=SimpleNamespace(device_id=0))

    def words() -> Any:
        return workspace.workspace(None, x, "a test", 8)

    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(words).result()
        assert theirs is other.submit(words).result()
    assert words() is words()
    assert words() is not theirs


def test_calls_of_many_sizes_share_few_workspaces(device, monkeypatch):
    """A workspace has a power of two of words, since those of a stream are kept until the process ends."""
    monkeypatch.setattr(Launch, "start", lambda *_: None)
    before = set(workspace._of_streams)
    recipe = fp8.BlockScaling(block=(None, 1))
    for n in range(1, 80):
        fp8.route(device.array(np.zeros((300 * n, 2), np.int32)), num_experts=n)
        fp8.splits_to_offsets(device.array(np.zeros(700 * n, np.int64)))
        x, splits = device.array(np.zeros((n, 8 * n), np.float32)), device.array(np.zeros(n, np.int64))
        fp8.group_quantize(x, splits, recipe, rowwise=False, columnwise=True)
    sizes: dict[str, list[int]] = {}
    for *_, use, words in workspace._of_streams.keys() - before:
        sizes.setdefault(use, []).append(words)
    assert {"route", "offsets", "group_amaxes"} <= sizes.keys()
    assert {words & words - 1 for found in sizes.values() for words in found} == {0}
    assert max(map(len, sizes.values())) <= 10


def test_a_workspace_lives_with_the_memory_it_serves(device):
    """Views come and go between calls, and between capture and replay; the array that owns the memory
    matters."""
    cp = device.cupy
    x, results = device.array(np.arange(1000, dtype=np.float32)), cp.zeros(4, np.float32)
    with cp.cuda.Stream(non_blocking=True) as stream:
        fp8.compute_amax(x, out=results[1:2])
        kept = workspace._of_results.of(results)
        assert [at for at, *_ in kept] == [results.data.ptr + 4]
        (words,) = kept.values()
        stream.begin_capture()
        fp8.compute_amax(x, out=results[1:2])
        graph = stream.end_capture()
        assert list(kept.values()) == [words]
        results.fill(7)
        graph.launch(stream)
        stream.synchronize()
    assert results.get().tolist() == [7, 999, 7, 7]
    owner = id(results)
    del results
    assert owner not in workspace._of_results._by_owner


def test_workspaces_are_not_inherited_with_an_address(device):
    """An array at the address of a deleted one gets new workspaces with its own lifetime, not remembered
    ones."""
    cp, x = device.cupy, device.array(np.arange(1000, dtype=np.float32))
    memory = cp.cuda.alloc(4)
    for _ in range(2):
        out = cp.ndarray((1,), np.float32, memory)
        for _ in range(2):
            assert fp8.compute_amax(x, out=out).get()[0] == 999
        assert len(workspace._of_results.of(out)) == 1
        gone = weakref.ref(out)
        del out
        gc.collect()
        assert gone() is None
