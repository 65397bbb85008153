"""pytest's report of a failed comparison."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["CI", "BUILD_NUMBER"])
def test_continuous_integration_shows_no_more_than_others_see(pytestconfig, monkeypatch, name):
    def said() -> list[list[str]]:
        compare = pytestconfig.hook.pytest_assertrepr_compare
        return compare(config=pytestconfig, op="==", left=b"ab", right=b"ac")

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BUILD_NUMBER", raising=False)
    elsewhere = said()
    monkeypatch.setenv(name, "1")
    assert said() == elsewhere
