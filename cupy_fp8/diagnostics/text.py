"""Reports as HTML, for notebooks."""

from __future__ import annotations

from html import escape


def html_table(facts: dict[str, str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in facts)
    body = "".join(f"<td>{escape(text)}</td>" for text in facts.values())
    return f"<table><tr>{head}</tr><tr>{body}</tr></table>"
