"""Opens every page of the built site in a real browser that has no network, and uses what has a
script: python site/look.py

On a phone's width and in dark mode as well, nothing may be wider than the screen, and no page may
say anything on the console.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from notebooks.browser import chromium  # noqa: E402

SITE = ROOT / "build" / "site" / "html"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def look(browser, folder: Path | None = None) -> list[str]:
    """What is wrong, in words; ``folder`` gets a screenshot of every page but the library's source
    and what is for paper.
    """
    wrong: list[str] = []
    for name, size, scheme in (("phone", PHONE, "dark"), ("desk", DESK, "light")):
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.on(
            "request",
            lambda request: request.url.startswith("file:") or wrong.append(f"loads {request.url}"),
        )
        context.on(
            "console",
            lambda said: said.type == "error" and wrong.append(f"{said.page.url}: {said.text}"),
        )
        context.on("weberror", lambda error: wrong.append(f"{error.page.url}: {error.error}"))
        for path in sorted(SITE.rglob("*.html")):
            if {"_static", "_modules", "sheets"} & set(path.parts):  # sheets are for paper
                continue
            page.goto(path.as_uri())
            written_by_run = path.name == "run.html"  # as it is
            if not written_by_run and not page.locator(".report a").count():
                wrong.append(f"{path.relative_to(SITE)}: has no link to report what is wrong")
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if wide > 0:
                wrong.append(f"{path.relative_to(SITE)}: {wide} pixels wider than a {name}")
            if folder:
                page.screenshot(
                    path=folder / f"{path.parent.name}-{path.stem}-{name}.png",
                    full_page="--full" in sys.argv,
                )
        context.close()
    checks = (fits, ledger, ledger_on_a_phone, turning_pages)
    return wrong + [f"{check.__name__}: {words}" for check in checks for words in check(browser)]


def fits(browser) -> list[str]:
    """The choice by keyboard, the address that says it, a deep link, and the button that copies."""
    context = browser.new_context(offline=True, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto((SITE / "fits.html").as_uri())
    choose = page.locator("#fits select[name=card]")
    choose.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    second = choose.locator("option").nth(1).get_attribute("value")
    page.wait_for_function(
        "card => new URLSearchParams(location.hash.slice(1)).get('card') === card", arg=second
    )
    wrong = [] if page.evaluate("document.activeElement.name") == "card" else ["the focus is lost"]
    again = context.new_page()
    again.goto(page.url)
    if (
        again.locator("#fits h2").first.text_content()
        != page.locator("#fits h2").first.text_content()
    ):
        wrong.append("a link does not lead to what it was copied from")
    again.locator("#fits td.yes a").first.press("Enter")
    again.locator("#fits button.copy").press("Enter")
    again.get_by_text("Copied").wait_for()
    copied = again.evaluate("navigator.clipboard.readText()")
    if "recipe = Recipe(" not in copied:
        wrong.append(f"what is copied is no code: {copied[:80]!r}")
    context.close()
    return wrong


def ledger(browser) -> list[str]:
    """Search, a filter, and none."""
    page = browser.new_page(offline=True)
    page.goto((SITE / "ledger.html").as_uri())
    shown = page.locator("table:has(a[href='#c01']) tbody tr:not([hidden])")
    every = shown.count()
    page.get_by_label("Verdict").select_option("does not hold")
    refuted = shown.count()
    page.get_by_role("searchbox", name="Search", exact=True).fill("bert-large")
    both = shown.count()
    page.close()
    return (
        []
        if every > refuted > both > 0
        else [f"{every}, then {refuted}, then {both} claims are shown"]
    )


MOST_SCREENS = 15  # of the ledger on a phone


def ledger_on_a_phone(browser) -> list[str]:
    """Claims are cards, each with its verdict in sight; a tap on a number opens its entry."""
    page = browser.new_page(viewport=PHONE, offline=True)
    page.goto((SITE / "ledger.html").as_uri())
    wrong = []
    verdicts = page.locator("table.cards.verdicts tbody td:last-child")
    boxes = [verdict.bounding_box() for verdict in verdicts.all()]
    if len(boxes) < 50:
        wrong.append(f"only {len(boxes)} claims are cards")
    if any(box["x"] < 0 or box["x"] + box["width"] > PHONE["width"] for box in boxes):
        wrong.append("a verdict is cut off")
    screens = page.evaluate("document.documentElement.scrollHeight") / PHONE["height"]
    if screens > MOST_SCREENS:
        wrong.append(f"the page is {screens:.0f} screens long, of {MOST_SCREENS}")
    page.locator("td a[href='#c10']").click()
    if not page.locator("section#c10").is_visible() or page.locator("section#c11").is_visible():
        wrong.append("a tap on C10 does not open its entry alone")
    page.close()
    return wrong


def turning_pages(browser) -> list[str]:
    """Each lesson ends with links to those before and after it."""
    page = browser.new_page(viewport=PHONE, offline=True)
    files = sorted((SITE / "lessons").glob("*.html"))
    wrong = []
    for before, file, after in zip(files, files[1:], files[2:], strict=False):
        page.goto(file.as_uri())
        for kind, other in (("left-prev", before), ("right-next", after)):
            if page.locator(f"a.{kind}").get_attribute("href") != other.name:
                wrong.append(f"{file.name}: {kind} does not lead to {other.name}")
    page.close()
    return wrong


if __name__ == "__main__":
    with chromium() as browser:
        found = look(browser, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    print("\n".join(found) or "Every page was opened without a network, and works.")
    sys.exit(bool(found))
