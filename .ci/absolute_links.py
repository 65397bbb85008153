"""Makes a checkout ready for the archives of a release: python .ci/absolute_links.py ADDRESS REVISION

PyPI shows the README, but not the pages and pictures that it links to. So these links get the address of the
repository (https://HOST/OWNER/NAME) at a revision, and pyproject.toml gets the repository's own addresses.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path.cwd()


def main(address: str, revision: str) -> None:
    address = address.rstrip("/")

    def absolute(match: re.Match[str]) -> str:
        picture, text, link = match.groups()
        if "://" in link or link.startswith("#"):
            return match[0]
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/{revision}/{link})"

    project, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    names = {"Repository": "", "Documentation": f"/blob/{revision}/docs/README.md",
             "Changelog": f"/blob/{revision}/CHANGELOG.md", "Issues": "/issues"}
    urls = "".join(f'{name} = "{address}{path}"\n' for name, path in names.items())
    before, mark, after = project.read_text("utf-8").partition("\n[tool.setuptools]\n")
    if "\n[project.urls]" in before:
        raise SystemExit("pyproject.toml has [project.urls] already")
    project.write_text(f"{before}\n[project.urls]\n{urls}{mark}{after}", "utf-8")
    readme.write_text(re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, readme.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
