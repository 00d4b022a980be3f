"""What is wrong with a built site: a link or a picture that leads nowhere, something loaded from a
network, too many bytes.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

MOST = 25_000_000  # bytes of the whole site
LOADED = {"img", "script", "iframe", "source", "video", "audio", "embed"}
REMOTE_CSS = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"]?(?:https?:)?//")


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif (
            tag == "link"
            and "href" in given
            and given.get("rel") not in ("canonical", "next", "prev")
        ):
            self.loads.append(given["href"])
        elif tag in LOADED and "src" in given:
            self.loads.append(given["src"])


def problems(site: Path) -> list[str]:
    """In words, each with the page that it was found on; links to other sites are not followed."""
    pages = {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [f"{here}: loads {url}" for url in page.loads if urlsplit(url).netloc]
        for url in [*page.links, *page.loads]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{here}: {url} leads nowhere")
            elif (
                parts.fragment
                and target in pages
                and not _has(pages[target], unquote(parts.fragment))
            ):
                found.append(f"{here}: {url} names no place on that page")
    for path in sorted(site.rglob("*.css")):
        if REMOTE_CSS.search(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site)}: loads something from a network")
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    return [
        *found,
        *([f"the site takes {size:,} bytes, of {MOST:,} that it may take"] if size > MOST else []),
    ]


def _has(page: Page, fragment: str) -> bool:
    """A fragment with "=" is read by the page's own script."""
    return fragment in page.ids or "=" in fragment
