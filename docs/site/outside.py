"""Files outside docs/ as parts of the site: a hook of MkDocs.

Pages link to files as the code host shows them (`../notebooks/01_formats.ipynb`). The site has those files
that `OUTSIDE` names under their own paths, sources as pages of code, and this hook turns links to them into
links within the site. A link to any other file outside docs/ fails the strict build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/*", "notebooks/*.ipynb",
           "notebooks/README.md", "examples/*.py", "tests/support/toy_op.*")
CODE = {".py": "python", ".cu": "cuda"}

_LINK = re.compile(r"(\]\(|href=\")([^)#\s\":]+)(?=[#)\"])")
#: What nbconvert loads for formulas and diagrams.
_SCRIPTS = re.compile(r'<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->'
                      r'|<script type="module">(?:(?!</script>).)*?/mermaid[./].*?</script>', re.DOTALL)
#: Examples with prompts, which the copy button then leaves out (site.css).
_EXAMPLE = re.compile(r"(?m)^```python\n(?=>>> )")
#: A name of docs/api: its heading for the code host, and the directive that describes it.
_NAME = re.compile(r"(?m)^## (\w+)\n\n(?=::: )")


@event_priority(100)        # before mkdocs-jupyter, which looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in CODE:
            text = f"# {name}\n\n```{CODE[path.suffix]}\n{path.read_text('utf-8')}```\n"
            files.append(File.generated(config, f"{name}.md", content=text))
        else:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("api/"):
        markdown = _with_one_heading(markdown)
    here = posixpath.dirname(uri)

    def link(found: re.Match[str]) -> str:
        target = _within_site(uri, found[2], files)
        return found[1] + (posixpath.relpath(target, here or ".") if target else found[2])

    return _LINK.sub(link, _EXAMPLE.sub("```pycon\n", markdown))


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """Notebooks, whose Markdown MkDocs does not see, with links within the site, and without scripts from
    elsewhere: they have neither formulas nor diagrams."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = _SCRIPTS.sub("", html)

    def link(found: re.Match[str]) -> str:
        target = files.get_file_from_path(_within_site(page.file.src_uri, found[2], files) or "")
        return found[1] + (target.url_relative_to(page.file) if target else found[2])

    return _LINK.sub(link, html)


def _within_site(uri: str, link: str, files: Files) -> str | None:
    """The site's name of what a page links to, None for what it does not have."""
    source = uri if _is_outside(uri) else f"docs/{uri}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target.startswith("docs/"):
        names = [target.removeprefix("docs/")]
    else:
        names = [target, f"{target}.md", f"{target}/README.md"]
    return next((name for name in names if files.get_file_from_path(name)), None)


def _is_outside(uri: str) -> bool:
    return not (ROOT / "docs" / uri).exists()


def _with_one_heading(markdown: str) -> str:
    """Each name with the heading that mkdocstrings makes, and the anchor that code hosts give."""
    seen: list[str] = []

    def heading(found: re.Match[str]) -> str:
        anchor = found[1].lower()
        seen.append(anchor)
        number = seen.count(anchor) - 1
        return f'<a id="{anchor}{f"-{number}" if number else ""}"></a>\n\n'

    return _NAME.sub(heading, markdown)
