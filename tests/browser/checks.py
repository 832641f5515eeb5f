"""Checks of a page in any state: axe-core's rules, light and dark, and no scrolling sideways."""

from collections.abc import Sequence
from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

WIDE, NARROWER = 1280, (320, 390, 700)
_ALL = {"resultTypes": ["violations"]}
_CONTRAST = {**_ALL, "runOnly": ["color-contrast"]}
"""This is the one rule whose verdict a dark page can change."""
_WATCH = """
window.layoutShift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.layoutShift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
_OVERLAPS = """() => {
  const things = "a,button,input:not([type=hidden]),select,textarea,img,svg,summary,label,h1,h2,h3,p,code,dt,dd,th,li";
  const over = ".count, .unseen, .go-bar, .skip, .md-code__nav, .md-sidebar-button, [hidden]";  // on others, or unseen
  const isVisible = (each) => each.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const isSeen = (each) => isVisible(each) && !each.closest(over) && !isClipped(each.closest("thead"));
  const isClipped = (head) => head && getComputedStyle(head).clipPath !== "none";  // a phone's tables name each cell
  const leaves = [...document.querySelectorAll(things)].filter((each) => isSeen(each) && !each.querySelector(things));
  const boxes = leaves.flatMap((each) => [...each.getClientRects()].map((box) => ({ each, box: inView(each, box) })))
    .filter(({ box }) => box.bottom > box.top && box.right > box.left);
  boxes.sort((one, other) => one.box.top - other.box.top);
  const found = [];
  for (let i = 0; i < boxes.length; i++) {
    for (let j = i + 1; j < boxes.length && boxes[j].box.top < boxes[i].box.bottom - 2; j++) {
      const [one, other] = [boxes[i], boxes[j]];
      const wide = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      if (one.each !== other.each && wide > 2 && !sameLabel(one.each, other.each)) {
        found.push(`${one.each.outerHTML.slice(0, 100)} overlaps ${other.each.outerHTML.slice(0, 100)}`);
      }
    }
  }
  return found.slice(0, 3);
  function inView(each, box) {  // what lists that scroll show of it
    let { top, bottom, left, right } = box;
    for (let list = each.parentElement; list; list = list.parentElement) {
      if (getComputedStyle(list).overflowY === "visible") continue;
      const edge = list.getBoundingClientRect();
      [top, bottom] = [Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
      [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
    }
    return { top, bottom, left, right };
  }
  function sameLabel(one, other) {  // a picture or a box within its label's area
    const isWithin = (each, label) => label && label.contains(each === one ? other : one);
    return [one, other].some((each) => isWithin(each, each.closest("label")));
  }
}"""
"""This finds things to be read or used whose boxes overlap."""
_BROKEN_WORDS = r"""() => {
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) {
    const node = texts.currentNode;
    const isFree = node.parentElement.closest("code, textarea, .md-typeset, details:not([open])");
    for (const word of isFree ? [] : node.data.matchAll(/(?<![^\s(“])[A-Za-z]{2,12}(?=[.,;:)”]?(\s|$))/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
    }
  }
  return found.slice(0, 3);
}"""
"""This finds words that break inside, of those that fit on a line."""
_AXE: str = Axe().axe_script


async def findings(page: Page, *, without: Sequence[str] = ()) -> list[str]:
    """Return what is wrong with the page now: the address, the rule, and the first element of each.

    Rules of axe-core that are named in `without` are left out.
    """
    found: list[str] = []
    for width in NARROWER:
        await page.set_viewport_size({"width": width, "height": 844})
        found += [f"{width}: {each}" for each in await _misplaced(page)]
    await page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    await page.set_viewport_size({"width": WIDE, "height": 900})
    found += await _violations(page, _CONTRAST) + await _misplaced(page)
    await page.emulate_media(color_scheme="light", reduced_motion="reduce")
    rules = {"rules": {rule: {"enabled": False} for rule in without}}
    return found + await _violations(page, _ALL | rules)


async def layout_shift(page: Page) -> float:
    """Return how far the page has jumped since it was opened (web.dev/cls), 0 for not at all.

    Scripts of `watch_layout` must watch.
    """
    return float(await page.evaluate("window.layoutShift"))


async def watch_layout(page: Page) -> None:
    """Watch the layout of every page that is opened from now on."""
    await page.add_init_script(_WATCH)


async def _misplaced(page: Page) -> list[str]:
    broken = [f"{page.url}: breaks the word {each}" for each in await page.evaluate(_BROKEN_WORDS)]
    return broken + await _sideways(page) + [f"{page.url}: {each}" for each in await page.evaluate(_OVERLAPS)]


async def _sideways(page: Page) -> list[str]:
    beyond = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    is_clipped = await page.evaluate(
        "[...document.querySelectorAll('.links')].some((e) => e.scrollWidth > e.clientWidth)"
    )
    clipped = [f"{page.url}: clips its navigation"] if is_clipped else []
    return clipped + ([f"{page.url}: scrolls sideways by {beyond} pixels"] if beyond > 0 else [])


async def _violations(page: Page, options: dict[str, Any]) -> list[str]:
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(_AXE)
    violations: list[Any] = await page.evaluate("async (options) => (await axe.run(options)).violations", options)
    look = "dark" if options is _CONTRAST else "light"
    return [f"{page.url}, {look}: {found['id']}: {found['nodes'][0]['html'][:160]}" for found in violations]
