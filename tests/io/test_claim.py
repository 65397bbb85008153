"""Two conversions into one place: with equal settings they share the work; otherwise one is refused, whenever
it started."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import BF16, config_of, convert, read, write

from cupy_fp8.io import convert as module
from cupy_fp8.io.claim import claimed
from cupy_fp8.io.replace import replacing

CHILD = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
_HOLD = """
import sys, time
from pathlib import Path
from cupy_fp8.io.claim import claimed
with claimed(Path(sys.argv[1]), sys.argv[2]):
    print("claimed", flush=True)
    time.sleep(60)
"""


def source(folder: Path, shards: int = 3) -> Path:
    rng = np.random.default_rng(0)
    for i in range(shards):
        write(
            folder / f"model-{i}.safetensors",
            {f"l.{i}.up.weight": rng.standard_normal((300, 256)).astype(np.float32).astype(BF16)},
            config={},
        )
    return folder


def holder(place: Path, what: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(place), what], stdout=subprocess.PIPE, text=True, env=CHILD
    )
    assert child.stdout
    assert child.stdout.readline() == "claimed\n"
    return child


def end(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def test_another_process_holds_the_place(tmp_path):
    child = holder(tmp_path, "one")
    try:
        with pytest.raises(ValueError, match="another conversion is at work here"), claimed(tmp_path, "two"):
            pass
        with claimed(tmp_path, "one") as check:
            check()
        assert len(list(tmp_path.iterdir())) == 1  # the other process still holds it
    finally:
        end(child)
    with claimed(tmp_path, "two") as check:  # what a killed process left is taken over
        check()
    assert not list(tmp_path.iterdir())


def test_a_claim_that_is_lost_is_noticed_before_a_rename(tmp_path):
    with claimed(tmp_path, "one") as check:
        (tmp_path / ".convert.partial").write_text("two")
        with pytest.raises(ValueError, match="has taken this place"), replacing(tmp_path / "a", check=check):
            pass
    assert not (tmp_path / "a").exists()


def test_a_file_is_claimed_by_its_name(tmp_path):
    with claimed(tmp_path / "a.safetensors", "one"), claimed(tmp_path / "b.safetensors", "two"):
        assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())


def test_many_claims_at_once(tmp_path):
    """Threads with two fingerprints try at the same time, repeatedly: both are never at work together."""
    at_work: dict[str, int] = {"one": 0, "two": 0}
    wrong: list[dict[str, int]] = []
    done: list[str] = []
    lock = threading.Lock()

    def work(what):
        for _ in range(40):
            try:
                with claimed(tmp_path, what):
                    with lock:
                        at_work[what] += 1
                        wrong.extend([dict(at_work)] if all(at_work.values()) else [])
                    time.sleep(0.001)
                    with lock:
                        at_work[what] -= 1
                done.append(what)
            except ValueError:
                continue

    threads = [threading.Thread(target=work, args=(what,)) for what in ("one", "two") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert done
    assert not list(tmp_path.iterdir())


def test_other_settings_are_refused_while_one_is_at_work(tmp_path, monkeypatch, capsys):
    """The second conversion begins when the first has not finished a single shard."""
    source(tmp_path / "in")
    inner: list[int] = []
    fill = module.Conversion._fill

    def fill_while_another_tries(self, *arguments):
        if not inner:
            inner.append(0)
            inner[0] = convert(tmp_path / "in", tmp_path / "out", "--recipe", "row")
        return fill(self, *arguments)

    monkeypatch.setattr(module.Conversion, "_fill", fill_while_another_tries)
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "mxfp8") == 0
    assert inner == [1]
    assert "another conversion is at work here" in capsys.readouterr().err
    assert {a.dtype.name for name, a in read(tmp_path / "out").items() if name.endswith("scale_inv")} == {
        "uint8"
    }
    assert config_of(tmp_path / "out")["quantization_config"]["quant_method"] == "mxfp8"
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("first", ["mxfp8", "row"])
def test_two_processes_with_other_settings(tmp_path, first):
    """Started together: one ends with 0 and leaves its own complete result, the other is refused."""
    source(tmp_path / "in", 5)
    second = {"mxfp8": "row", "row": "mxfp8"}[first]
    children = {
        recipe: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cupy_fp8",
                "convert",
                tmp_path / "in",
                tmp_path / "out",
                "--recipe",
                recipe,
                "--array",
                "numpy",
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=CHILD,
        )
        for recipe in (first, second)
    }
    errors = {recipe: child.communicate()[1] for recipe, child in children.items()}
    codes = {recipe: child.returncode for recipe, child in children.items()}
    assert sorted(codes.values()) == [0, 1], errors
    winner = next(recipe for recipe, code in codes.items() if code == 0)
    assert re.search(
        "another conversion|not of this conversion", errors[{"mxfp8": "row", "row": "mxfp8"}[winner]]
    )
    assert convert(tmp_path / "in", tmp_path / "alone", "--recipe", winner) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()
    }


def test_the_same_settings_share_the_work(tmp_path):
    source(tmp_path / "in", 4)
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cupy_fp8",
                "convert",
                tmp_path / "in",
                tmp_path / "out",
                "--recipe",
                "row",
                "--part",
                f"{i}/2",
                "--array",
                "numpy",
            ],
            stdout=subprocess.DEVNULL,
            env=CHILD,
        )
        for i in (1, 2)
    ]
    assert [child.wait() for child in children] == [0, 0]
    assert convert(tmp_path / "in", tmp_path / "alone", "--recipe", "row") == 0
    if not (tmp_path / "out" / "config.json").exists():  # neither saw the other's last shard
        assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "row") == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()
    }


def test_a_shard_of_another_part_and_other_settings(tmp_path, capsys):
    """Refused at once, and not when the last part ends."""
    source(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "row", "--part", "2/3") == 0
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "mxfp8", "--part", "1/3") == 1
    assert "is there already, and not of this conversion" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model-1.safetensors"]


def test_a_shard_that_was_exchanged_meanwhile(tmp_path):
    """By the same conversion with other settings, after this one began: nothing is finished, and a folder of
    two recipes gets no index."""
    source(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "other", "--recipe", "mxfp8") == 0
    settings = module.Settings("row")
    with module.Conversion(tmp_path / "in", tmp_path / "out", settings) as ours:
        for shard in ours.shards:
            ours.convert(shard, lambda _: None)
        name = "model-1.safetensors"
        good = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_bytes((tmp_path / "other" / name).read_bytes())
        assert not ours.finish()
        assert len(list((tmp_path / "out").glob("*.json"))) == 0
        (tmp_path / "out" / name).write_bytes(good)
        assert ours.finish()
        assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_folder_with_other_weights_is_refused(tmp_path, capsys):
    source(tmp_path / "in")
    write(tmp_path / "out" / "stranger.safetensors", {"w": np.ones(3, np.float32)})
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "row") == 1
    assert "has stranger.safetensors, which is not of this checkpoint" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stranger.safetensors"]


@pytest.mark.parametrize(
    "options",
    [
        ["--exclude", "l.0.*"],
        ["--exclude", "nothing.*"],
        ["--include", "x"],
        ["--block", "64,64"],
        ["--scales", "none"],
    ],
    ids=str,
)
def test_every_setting_counts(tmp_path, options, capsys):
    source(tmp_path / "in", 1)
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "row") == 0
    assert convert(tmp_path / "in", tmp_path / "out", "--recipe", "row", *options) == 1
    assert "is there already, and not of this conversion" in capsys.readouterr().err


def test_a_claim_that_is_taken_away(tmp_path):
    """The file was deleted, and another conversion created it again."""
    with claimed(tmp_path, "one") as check:
        (tmp_path / ".convert.partial").unlink()
        with claimed(tmp_path, "two") as other:
            other()
            with pytest.raises(ValueError, match="has taken this place"):
                check()
