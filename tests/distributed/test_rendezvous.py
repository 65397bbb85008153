"""Ranks that find each other, exchange a few bytes, and fail with messages."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import cupy_fp8 as fp8
from cupy_fp8.distributed import RankError
from cupy_fp8.distributed.environment import Place, place
from cupy_fp8.distributed.rendezvous import Rendezvous


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ranks(port: int, size: int, function: Callable[[Rendezvous], Any], *, timeout: float = 5,
          tokens: dict[int, bytes] | None = None, sizes: dict[int, int] | None = None,
          left_out: tuple[int, ...] = ()) -> list[Any]:
    """Return what function returns, or raises, in a thread for each rank."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        here = Place(rank, (sizes or {}).get(rank, size), rank, "127.0.0.1", port,
                     (tokens or {}).get(rank, b"t" * 32))
        made = None
        try:
            made = Rendezvous(here, timeout)
            results[rank] = function(made)
        except Exception as error:      # compared by the test
            results[rank] = error
        finally:
            if made is not None:
                made.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size) if rank not in left_out]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_values_come_by_rank_in_order(port):
    def calls(made: Rendezvous) -> list[list[bytes]]:
        return [made.gather(bytes([made.rank]) * (made.rank * n)) for n in (0, 1, 70_000)]

    want = [[bytes([rank]) * (rank * n) for rank in range(4)] for n in (0, 1, 70_000)]
    assert ranks(port, 4, calls) == [want] * 4


def test_one_rank_needs_no_others(port):
    assert ranks(port, 1, lambda made: made.gather(b"x")) == [[b"x"]]


def test_a_rank_that_does_not_come_is_named(port):
    found = ranks(port, 3, lambda made: made.gather(), timeout=0.4, left_out=(2,))
    assert str(found[0]) == "rank 2 did not connect in 0.4 s"
    assert found[0].ranks == (2,)
    assert isinstance(found[1], RankError)


def test_a_late_rank_is_named_on_all_others(port):
    def calls(made: Rendezvous) -> Any:
        if made.rank == 1:
            time.sleep(1.2)
        return made.gather(timeout=0.3)

    found = ranks(port, 3, calls)
    assert [str(found[rank]) for rank in (0, 2)] == ["rank 1 did not come in time"] * 2
    assert [found[rank].ranks for rank in (0, 2)] == [(1,)] * 2
    assert isinstance(found[1], RankError)


def test_a_rank_that_ends_is_named_and_later_calls_say_so(port):
    def calls(made: Rendezvous) -> Any:
        made.gather()
        if made.rank == 2:
            made.close()
            return "ended"
        with pytest.raises(RankError, match="rank 2 has ended"):
            made.gather()
        with pytest.raises(RankError, match="a call before has failed: rank 2 has ended"):
            made.gather()
        return "told"

    assert ranks(port, 4, calls) == ["told", "told", "ended", "told"]


def test_strangers_are_turned_away(port):
    def stranger() -> None:
        time.sleep(0.1)
        for hello in (b"GET / HTTP/1.1\r\n\r\n" * 9, b""):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(hello)

    thread = threading.Thread(target=stranger)
    thread.start()

    def calls(made: Rendezvous) -> list[bytes]:
        return made.gather(b"%d" % made.rank)

    slow = {1: lambda: time.sleep(0.4)}
    results: list[Any] = [None, None]

    def one(rank: int) -> None:
        slow.get(rank, lambda: None)()
        made = Rendezvous(Place(rank, 2, rank, "127.0.0.1", port, b"t" * 32), 5)
        results[rank] = calls(made)
        made.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in (*threads, thread):
        each.join()
    assert results == [[b"0", b"1"]] * 2


def test_other_jobs_and_other_numbers_of_ranks(port):
    found = ranks(port, 2, lambda made: made.gather(), timeout=0.5, tokens={1: b"u" * 32})
    assert [type(error) for error in found] == [RankError, RankError]
    assert "turned rank 1 away" in str(found[1])
    found = ranks(port, 2, lambda made: made.gather(), timeout=0.5, sizes={1: 3})
    assert str(found[0]) == "rank 1 was started for 3 ranks, rank 0 for 2"


@pytest.mark.parametrize(("environ", "want"), [
    ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
     (2, 4, 0, "a", 7)),
    ({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "x"},
     (2, 4, 2, "a", 8)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, 1, "127.0.0.1", 29_513)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3", "MASTER_ADDR": "n",
      "CUPY_FP8_PORT": "9"},
     (3, 8, 3, "n", 9)),
    ({}, (0, 1, 0, "127.0.0.1", 29_513))])
def test_what_starters_say(environ, want):
    assert place(environ)[:5] == want


@pytest.mark.parametrize(("environ", "message"), [
    ({"RANK": "0"}, "WORLD_SIZE: not set, though others of its kind are"),
    ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "RANK=4: expected 0 to 3, as WORLD_SIZE=4 says"),
    ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK: expected a number, got 'x'"),
    ({"RANK": "1", "WORLD_SIZE": "4"}, "MASTER_ADDR: not set; it is the host of rank 0")])
def test_variables_that_do_not_fit(environ, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        place(environ)


def test_local_ranks_agree_or_are_told():
    def told(world: Any) -> str:
        world.agree({"hidden": 7168, "topk": 8})
        with pytest.raises(ValueError, match=r"topk: rank \d has \d, rank \d \d; all ranks need the same"):
            world.agree({"hidden": 7168, "topk": 8 - (world.rank == 2)})
        return repr(world)

    assert fp8.distributed.local(3).run(told) == [f"World(rank {rank} of 3)" for rank in range(3)]


def test_local_ranks_do_not_wait_for_one_that_fails():
    def fails(world: Any) -> None:
        if world.rank == 1:
            raise KeyError("lost")
        world.barrier()

    with pytest.raises(KeyError, match="lost"):
        fp8.distributed.local(3).run(fails)


def test_local_ranks_name_one_that_is_late():
    def late(world: Any) -> Any:
        if world.rank == 2:
            return None
        with pytest.raises(RankError) as caught:
            world.barrier()
        return caught.value.ranks

    assert fp8.distributed.local(3, timeout=0.3).run(late) == [(2,), (2,), None]
