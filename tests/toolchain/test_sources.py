"""The digest of a program's sources: every source and header, by name and contents."""

from __future__ import annotations

from pathlib import Path

from cupy_fp8.kernels import sources


def digests(root: Path, monkeypatch) -> str:
    monkeypatch.setattr(sources, "root", lambda: root)
    return sources.digest.__wrapped__()


def test_a_digest_changes_with_every_file(tmp_path, monkeypatch):
    """Otherwise, after a change of a header, the old program would be loaded from CuPy's cache."""
    names = ("one.cu", "family/two.cu", "include/three.cuh", "include/family/four.cuh")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    seen = {digests(tmp_path, monkeypatch)}
    for name in names:
        (tmp_path / name).write_text("other text")
        seen.add(digests(tmp_path, monkeypatch))
        (tmp_path / name).rename((tmp_path / name).with_stem("renamed"))
        seen.add(digests(tmp_path, monkeypatch))
    assert len(seen) == 1 + 2 * len(names)
    (tmp_path / "notes.txt").write_text("no source")
    assert digests(tmp_path, monkeypatch) in seen
