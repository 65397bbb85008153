"""A release's statements outside the code: versions, Pythons, links that work on PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_fp8 import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "pattern"), [
    ("CITATION.cff", r"^version: (.+)$"), ("recipe/meta.yaml", r'^{% set version = "(.+)" %}$'),
    ("CHANGELOG.md", r"\A# Changelog\n\n## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$")])
def test_every_file_states_the_version_of_the_package(name, pattern):
    assert re.findall(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE) == [__version__]


def test_the_workflow_tries_every_python_that_the_metadata_name():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r'^    "Programming Language :: Python :: (3\.\d+)",$', project, re.MULTILINE)
    assert f'requires-python = ">={named[0]}"' in project
    workflow = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    (tried,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert tried == ", ".join(f'"{version}"' for version in named)


@pytest.mark.parametrize(("tag", "day", "published"), [
    (f"v{__version__}", "2026-12-01", True), (f"v{__version__}", "unreleased", False),
    ("v999.0", "2026-12-01", False), (f"v{__version__}.1", "2026-12-01", False)])
def test_a_tag_of_another_version_is_refused(tag, day, published, tmp_path):
    """By the commands of the workflow, with archives built from this version."""
    workflow = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    (commands,) = re.findall(r"- name: The tag is .*\n +if: .*\n +run: \|\n((?: {10}.*\n)+)", workflow)
    (tmp_path / "dist").mkdir()
    for end in (".tar.gz", "-py3-none-any.whl"):
        (tmp_path / f"dist/cupy_fp8-{__version__}{end}").touch()
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} ({day})\n")
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=os.environ | {"GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) == published


def test_links_of_a_release_are_absolute(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, str(ROOT / ".ci/absolute_links.py"), "https://host.example/owner/name", "v9"]
    subprocess.run(command, cwd=tmp_path, check=True)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", (tmp_path / "README.md").read_text("utf-8"))
    for picture, link in links:
        kind = "raw" if picture else "blob"
        path = link.removeprefix(f"https://host.example/owner/name/{kind}/v9/").partition("#")[0]
        assert (ROOT / path).is_file(), link
    assert len(links) > 10
    project = (tmp_path / "pyproject.toml").read_text("utf-8")
    assert '\n[project.urls]\nRepository = "https://host.example/owner/name"\n' in project
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1
    assert "already" in again.stderr
