"""What mkdocs does to the pages besides (mkdocs.yml): two of them stand at the root of the repository.

README.md is the first page of the site, and CONTRIBUTING.md a page of it. Of a link to any other file outside of docs/
the site has the path as text. Notes for tests/test_docs.py are left out. The lists of options and codecs in
reference.md are made here, from the code.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: Files at the root that are pages of the site, and what they are called there.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<path>[^\s()#:]+)(?P<anchor>#[^\s()]*)?\)")
_NOTE = re.compile(r"^<!-- (?:not run|run with): [^>]*-->\n", flags=re.MULTILINE)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that stand at the root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where the files are in the site."""
    if page.file.src_uri == "reference.md":
        sys.path.insert(0, str(ROOT))
        lists = importlib.import_module("docs.list_options")
        markdown = markdown.replace("<!-- options -->", lists.options_list())
        markdown = markdown.replace("<!-- codecs -->", lists.codecs_list())
    folder = ROOT if page.file.src_uri in PAGES.values() else (DOCS / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match["path"]).resolve()
        if not target.exists():
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        if path in PAGES or target.is_relative_to(DOCS):
            return f"[{match['text']}]({PAGES.get(path, path.removeprefix('docs/'))}{match['anchor'] or ''})"
        return match["text"] if match["text"].strip("`") in path else f"{match['text']} (`{path}`)"

    text = _LINK.sub(link, _NOTE.sub("", markdown))
    return text.replace("](docs/", "](") if folder == ROOT else text  # pictures
