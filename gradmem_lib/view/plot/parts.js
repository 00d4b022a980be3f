// The parts of the page that a picture consists of.

import { hatched } from "./draw.js";
import { GROUPINGS } from "./stack.js";
import { make } from "./words.js";

const KEYS = [["← →", "move"], ["P", "peak"], ["+ − 0", "zoom"], ["Esc", "let go"]];
const KEYS_OF_BLOCKS = [["↑ ↓", "blocks of a moment"], ["Enter", "pin"], ["G", "regroup"]];

function listKeys(line, pairs) {
  for (const [keys, meaning] of pairs) {
    make("kbd", "", line, keys);
    line.append(` ${meaning}   `);
  }
}

// A row of the table: a swatch and a name. Returns the cell of its bytes.
export function addRow(tr, look, name) {
  const th = make("th", "", tr), label = make("div", "gm-label", th), swatch = make("canvas", "gm-swatch", label);
  th.scope = "row";
  th.title = name;
  make("bdi", "", make("span", "gm-name", label), name);
  swatch.width = 34;
  swatch.height = 28;
  const g = swatch.getContext("2d");
  g.fillStyle = g.createPattern(hatched(look, 2), "repeat");
  g.fillRect(0, 0, 34, 28);
  return make("td", "", tr, "–");
}

// A large figure of the head: its name, its bytes, and more.
function addFigure(head, name) {
  const box = make("div", "gm-figure", head);
  make("span", "", box, `${name} `);
  return { bytes: make("b", "", box, "–"), more: make("span", "", box) };
}

export function buildParts(el, { title, isSmall, growing, phases }) {
  const root = make("figure", isSmall ? "gm-live gm-small" : "gm-live", el);
  const head = make("div", "gm-head", root), heading = make("div", "gm-title", head), dot = make("span", "gm-dot", heading);
  dot.title = "recording";
  heading.append(title || "Memory by category");
  heading.title = title; // a long one is cut
  const peak = addFigure(head, "peak"), now = addFigure(head, "now");

  const body = make("div", "gm-body", root), plot = make("div", "gm-plot", body), canvas = make("canvas", "gm-canvas", plot);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "memory plot");
  canvas.dataset.lmSuppressShortcuts = "true"; // JupyterLab takes some arrow keys to move between cells
  const tip = make("div", "gm-tip", plot);
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true"); // the line below says more

  const side = make("div", "gm-side", body), bar = make("div", "gm-by", side);
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "group the bytes by");
  for (const by of GROUPINGS) make("button", "", bar, by).dataset.by = by;
  const table = make("table", "", side), caption = make("caption", "gm-hidden", table), top = make("tr", "", make("thead", "", table));
  const what = make("th", "", top), when = make("td", "", top, "now"), rows = make("tbody", "", table);
  what.scope = "col";
  const foot = make("tfoot", "", table), footRow = make("tr", "", foot);
  make("th", "", footRow, "total").scope = "row";
  const sum = make("td", "", footRow, "–"), growingRow = make("tr", "gm-growing gm-none", foot);
  const growingCell = addRow(growingRow, growing.look, growing.name);
  const key = make("div", "gm-phases", side);
  const phaseMarks = phases.map((phase) => {
    if (!phase) return null;
    const item = make("span", "", key), mark = make("i", "", item);
    item.append(phase);
    return mark;
  });
  const below = make("div", "gm-below", root), read = make("div", "gm-read", below), keys = make("div", "gm-keys", below);
  read.setAttribute("aria-live", "polite");
  listKeys(make("span", "", keys), KEYS);
  const keysOfBlocks = make("span", "", keys);
  listKeys(keysOfBlocks, KEYS_OF_BLOCKS);
  return {
    root, head, dot, peak, now, plot, canvas, tip, bar, caption, what, when, rows, sum, growingRow, growingCell, key, phaseMarks, read, keys,
    keysOfBlocks,
  };
}
