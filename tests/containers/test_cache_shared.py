"""A WeightCache used by several threads and copies."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

from cached_weights import change, weights_of
from list_results import assert_same, raw

from cupy_fp8 import CurrentScaling, WeightCache, testing
from cupy_fp8.calls.call import run as run_op


def test_forgotten_while_quantised(run, monkeypatch):
    """clear() in another thread at the worst moment: the call returns its results, and none of them is
    remembered."""
    cache, weights = WeightCache(CurrentScaling()), weights_of(run)
    cache.quantize(weights[:2])

    def cleared(*given: Any) -> Any:
        cache.clear()
        return run_op(*given)

    monkeypatch.setattr("cupy_fp8.cache.run", cleared)
    for update in (True, False):
        for w, q in zip(weights, cache.quantize(weights, update=update), strict=True):
            assert_same(q, CurrentScaling().quantize(w))
        assert len(cache) == 0
    monkeypatch.undo()
    change(weights)
    for w, q in zip(weights, cache.quantize(weights, update=False), strict=True):  # not the old one
        assert_same(q, CurrentScaling().quantize(w))


def test_forgotten_while_a_known_list_is_looked_up(run):
    """clear() in another thread between a look-up and its note: what was cleared is not found again."""
    cache, weights, others = WeightCache(CurrentScaling()), weights_of(run), weights_of(run, 7)
    for _ in range(2):
        first = cache.quantize(weights)
        cache.quantize(others)                              # the other list is then not the last one

    class Cleared(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if found is not None:
                cache._hits = dict(self)
                cache.clear()
            return found

    cache._hits = Cleared(cache._hits)
    assert cache.quantize(weights, update=False)[0] is first[0]
    change(weights)
    again = cache.quantize(weights, update=False)
    assert again[0] is not first[0]
    assert_same(again[0], CurrentScaling().quantize(weights[0]))


def test_copies_watch_the_weights_by_themselves(run):
    cache, weights = WeightCache(CurrentScaling()), weights_of(run)
    first = cache.quantize(weights)
    other = copy.deepcopy(cache)
    assert (len(other), other.nbytes) == (4, cache.nbytes)
    found = other.quantize(weights, update=False)
    assert raw(found) == raw(first)
    assert found[0] is not first[0]
    cache.clear()
    del weights[0]
    gc.collect()
    assert (len(cache), len(other)) == (0, 3)


def test_threads_share_a_cache():
    cache, weights = WeightCache(CurrentScaling()), weights_of(testing.Executor("reference"))
    wanted = [CurrentScaling().quantize(w) for w in weights]
    stop, failures = threading.Event(), []

    def quantize() -> None:
        try:
            while not stop.is_set():
                assert cache.quantize(weights, update=False) == wanted
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=quantize) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        cache.clear()
        len(cache), cache.nbytes
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
