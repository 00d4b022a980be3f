// Draws a run on a canvas: areas, axes, the strip of phases, and marks. Nothing here knows of the pointer or the keys.

import { climb } from "./stack.js";
import { ALARM, INK, UNITS, formatBytes, grouped, isDark, niceStep } from "./words.js";

export const PAD = { left: 52, right: 14, top: 38, bottom: 38 };
export const STRIP = 21; // the strip begins so far above the areas
export const MOST_BATCHES = 12; // marks of changes of the batch's size; more would hide the picture
export const STRIP_HEIGHT = 15;
const SHORT = ["", "fwd", "bwd", "step"]; // phases by index, where the strip is too narrow for their names
const SEEN = 3; // pixels from which on a block has an outline of its own

// A category's fill: its colour, and marks that tell it apart without colour. The same signs as in style.py.
// What grows has no colour of its own ("none"): its marks stand on the page itself.
export function hatched([color, sign], scale) {
  const size = 8, tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size * scale);
  const g = tile.getContext("2d");
  g.scale(tile.width / size, tile.height / size);
  let ink = INK;
  if (color !== "none") {
    g.fillStyle = color;
    g.fillRect(0, 0, size, size);
    ink = isDark(color) ? "rgba(255,255,255,.42)" : "rgba(16,20,28,.3)";
  }
  g.strokeStyle = g.fillStyle = ink;
  g.beginPath();
  const line = (x0, y0, x1, y1) => { g.moveTo(x0, y0); g.lineTo(x1, y1); };
  if (sign === "/") { line(-2, 2, 2, -2); line(0, 8, 8, 0); line(6, 10, 10, 6); }
  if (sign === "\\") { line(-2, 6, 2, 10); line(0, 0, 8, 8); line(6, -2, 10, 2); }
  if (sign === "-") line(0, 4, 8, 4);
  if (sign === "|") { line(2, 0, 2, 8); line(6, 0, 6, 8); }
  if (sign === "x") { line(0, 0, 8, 8); line(0, 8, 8, 0); }
  g.stroke();
  if (sign === ".") for (const c of [2, 6]) { g.beginPath(); g.arc(c, c, 1.1, 0, 7); g.fill(); }
  return tile;
}

// A look as what a canvas fills with, at so many device pixels a pixel.
export function fillOf(g, look, ratio) {
  const pattern = g.createPattern(hatched(look, ratio), "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

// The bytes that the axis reaches, in half steps of its marks, so that it does not tremble while a run grows. A budget far
// above the run is left out, since it would flatten the picture.
export function topOf(highest, budget) {
  const [, factor] = UNITS.find(([, f]) => highest >= f) || ["B", 1];
  const reach = Math.max(highest, budget <= 2.5 * highest ? budget : 0) * 1.08, half = (niceStep(reach / factor, 4) * factor) / 2;
  return Math.ceil(reach / half) * half;
}

// The place of operations and bytes on the canvas: x0 to x1 for view.from to view.to, y0 (below) to y1 for 0 to top.
export function placeOf(width, height, view, top) {
  const x0 = PAD.left, x1 = width - PAD.right, y0 = height - PAD.bottom, y1 = PAD.top;
  return {
    x0, x1, y0, y1, top,
    x: (op) => x0 + ((op - view.from) / (view.to - view.from)) * (x1 - x0),
    y: (bytes) => y0 - (bytes / top) * (y0 - y1),
    op: (x) => view.from + ((x - x0) / (x1 - x0)) * (view.to - view.from),
    bytes: (y) => ((y0 - y) / (y0 - y1)) * top,
  };
}

// The samples in sight, each with its left edge; of several in one pixel the fullest, so that no peak is lost.
export function columnsOf(run, edges, place) {
  const samples = [], xs = [];
  for (let i = 0; i < run.n; i++) {
    const left = Math.max(place.x(edges[i]), place.x0), right = Math.min(place.x(edges[i + 1]), place.x1);
    if (right <= left) continue;
    const last = samples.length - 1;
    if (last >= 0 && left - xs[last] < 1) {
      if (run.totals[i] > run.totals[samples[last]]) samples[last] = i;
      continue;
    }
    samples.push(i);
    xs.push(left);
  }
  const end = Math.min(place.x(edges[run.n]), place.x1);
  return { samples, xs: [...xs, end] };
}

// Steps, not slopes: a value holds until the next sample.
function stairs(g, xs, ys) {
  g.moveTo(xs[0], ys[0]);
  for (let k = 0; k < ys.length; k++) {
    if (k && ys[k] !== ys[k - 1]) g.lineTo(xs[k], ys[k]);
    if (ys[k + 1] !== ys[k]) g.lineTo(xs[k + 1], ys[k]);
  }
}

function fillBetween(g, xs, high, low) {
  g.beginPath();
  stairs(g, xs, high);
  for (let k = low.length - 1; k >= 0; k--) { g.lineTo(xs[k + 1], low[k]); g.lineTo(xs[k], low[k]); }
  g.closePath();
  g.fill();
}

export function drawAreas(g, groups, { samples, xs }, place, fills, { paper, ink }) {
  const dense = samples.length > (place.x1 - place.x0) / 4; // spikes this close would be covered by their own outline
  let sum = new Float64Array(samples.length), low = Array.from(sum, place.y);
  g.lineJoin = "round";
  groups.forEach((group, k) => {
    if (!samples.some((i) => group.total[i] > 0)) return;
    sum = sum.map((v, c) => v + group.total[samples[c]]);
    const high = Array.from(sum, place.y);
    g.fillStyle = fills[k];
    fillBetween(g, xs, high, low);
    g.beginPath();
    stairs(g, xs, high);
    g.strokeStyle = paper;
    g.globalAlpha = dense ? 0.25 : 0.8;
    g.lineWidth = 0.8;
    g.stroke();
    g.globalAlpha = 1;
    low = high;
  });
  g.globalAlpha = dense ? 0.3 : 1;
  g.beginPath();
  stairs(g, xs, low);
  g.strokeStyle = ink;
  g.lineWidth = dense ? 0.6 : 1.2;
  g.stroke();
  g.globalAlpha = 1;
}

// Fine lines between blocks that are high enough to be seen.
export function drawBlocks(g, groups, { samples, xs }, place, { paper }) {
  const height = place.y(0) - place.y(1);
  g.beginPath();
  climb(groups, samples, (block, first, end, feet) => {
    if (block.bytes * height < SEEN) return;
    const tops = Array.from(feet.subarray(first, end), (foot) => place.y(foot + block.bytes));
    stairs(g, xs.slice(first, end + 1), tops);
  });
  g.strokeStyle = paper;
  g.globalAlpha = 0.45;
  g.lineWidth = 0.6;
  g.stroke();
  g.globalAlpha = 1;
}

// A block over its whole life (see lifeOf).
export function drawLife(g, life, bytes, { xs }, place, { ink, paper }, isPinned) {
  if (!life) return;
  const { first, feet } = life, own = xs.slice(first, first + feet.length + 1);
  own[feet.length] = Math.max(own[feet.length], own[0] + 2); // a short life is seen as well
  const high = Array.from(feet, (foot) => place.y(foot + bytes)), low = Array.from(feet, (foot, k) => Math.max(place.y(foot), high[k] + 2));
  g.globalAlpha = isPinned ? 0.75 : 0.45;
  g.fillStyle = ink;
  fillBetween(g, own, high, low);
  g.globalAlpha = 1;
  if (bytes * (place.y(0) - place.y(1)) < SEEN) return; // an outline would hide what lies beside it
  g.strokeStyle = paper;
  g.lineWidth = 1;
  for (const edge of [high, low]) { g.beginPath(); stairs(g, own, edge); g.stroke(); }
}

export function drawAxes(g, place, view, whole, { ink, line, font }, highest) {
  const { x0, x1, y0, y1, top } = place, [unit, factor] = UNITS.find(([, f]) => highest >= f) || ["B", 1];
  const yStep = niceStep(top / factor, 4) * factor;
  g.font = `11px ${font}`;
  g.textBaseline = "middle";
  g.textAlign = "right";
  for (let v = 0; v <= top + 1; v += yStep) {
    const y = Math.round(place.y(v)) + 0.5;
    g.strokeStyle = line;
    g.lineWidth = 1;
    g.globalAlpha = 0.55;
    g.beginPath(); g.moveTo(x0, y); g.lineTo(x1, y); g.stroke();
    g.globalAlpha = 0.75;
    g.fillStyle = ink;
    g.fillText(String(+(v / factor).toPrecision(6)), x0 - 8, y);
  }
  g.fillText(unit, x0 - 8, y1 - 13);
  g.textAlign = "center";
  const xStep = Math.max(1, niceStep(view.to - view.from, Math.max(2, (x1 - x0) / 95)));
  for (let o = Math.ceil(view.from / xStep) * xStep; o <= view.to; o += xStep) {
    if (place.x(o) < x1 - 8) g.fillText(grouped(o), place.x(o), y0 + 13);
  }
  const isWhole = view.from === whole.from && view.to === whole.to;
  const part = `operations ${grouped(view.from)} to ${grouped(view.to)} of ${grouped(whole.to)}; double click: all`;
  g.fillText(isWhole ? "operations" : part, (x0 + x1) / 2, y0 + 29);
  g.globalAlpha = 1;
  g.strokeStyle = ink;
  g.lineWidth = 1;
  g.beginPath(); g.moveTo(x0, y0 + 0.5); g.lineTo(x1, y0 + 0.5); g.stroke();
  if (isWhole) return;
  // Where in the whole run this is.
  const at = (op) => x0 + ((op - whole.from) / (whole.to - whole.from)) * (x1 - x0);
  g.lineWidth = 3;
  g.beginPath(); g.moveTo(at(view.from), y0 + 2); g.lineTo(Math.max(at(view.to), at(view.from) + 3), y0 + 2); g.stroke();
}

// The strip of phases above the areas, or of steps where phases are too many.
export function drawStrip(g, place, boxes, isSteps, phases, { tones, font, ink }) {
  const { x0, x1, y0, y1 } = place;
  g.font = `10.5px ${font}`;
  g.textAlign = "center";
  for (const box of boxes) {
    const tone = isSteps ? tones[1 + (box.number % 2)] : tones[box.phase];
    const a = Math.max(place.x(box.from), x0), b = Math.min(place.x(box.to), x1);
    if (!tone || b <= a) continue;
    g.fillStyle = tone;
    g.fillRect(a, y1 - STRIP, Math.max(b - a - (b - a > 6 ? 1 : 0), 0.5), STRIP_HEIGHT);
    const names = isSteps ? [`step ${box.number}`, `${box.number}`] : [phases[box.phase], SHORT[box.phase]];
    const label = names.find((name) => g.measureText(name).width + 4 < b - a);
    if (label) {
      g.fillStyle = isDark(tone) || tone === "#7b8495" ? "#fff" : "#14181f";
      g.fillText(label, (a + b) / 2, y1 - 13);
    }
    if (boxes.length <= 40 && a > x0) {
      g.strokeStyle = ink;
      g.globalAlpha = 0.16;
      g.lineWidth = 1;
      g.beginPath(); g.moveTo(a, y1 - 6); g.lineTo(a, y0); g.stroke();
      g.globalAlpha = 1;
    }
  }
}

// Where the batch's size changes: a line, and above the strip the size from there on.
export function drawBatches(g, place, batches, { ink, font }) {
  const { x0, x1, y0, y1 } = place;
  g.font = `10.5px ${font}`;
  g.textAlign = "left";
  g.strokeStyle = g.fillStyle = ink;
  g.lineWidth = 1.1;
  let free = x0; // where the next label may begin
  for (const [i, { op, rows }] of (batches.length > MOST_BATCHES ? [] : batches).entries()) {
    const x = place.x(op), label = `batch ${grouped(rows)}`, wide = g.measureText(label).width;
    if (x > x1) continue;
    if (i && x >= x0) {
      g.setLineDash([3, 3]);
      g.globalAlpha = 0.75;
      g.beginPath(); g.moveTo(x, y1 - 6); g.lineTo(x, y0); g.stroke();
      g.setLineDash([]);
      g.globalAlpha = 1;
    }
    const start = Math.max(Math.min(x, x1 - wide), x0);
    if (start < free) continue;
    free = start + wide + 6;
    g.fillText(label, start, y1 - STRIP - 8);
  }
}

function halo(g, text, x, y, paper) {
  g.lineWidth = 3.5;
  g.strokeStyle = paper;
  g.strokeText(text, x, y);
  g.fillText(text, x, y);
}

// The budget's line, and its name where it does not hide the peak.
export function drawBudget(g, place, budget, { paper, font }) {
  const { x0, x1, y1 } = place, isInside = budget <= place.top, y = isInside ? place.y(budget) : y1;
  g.font = `600 12px ${font}`;
  g.textAlign = "left";
  g.strokeStyle = g.fillStyle = ALARM;
  if (isInside) {
    g.setLineDash([6, 4]);
    g.lineWidth = 1.6;
    g.beginPath(); g.moveTo(x0, y); g.lineTo(x1, y); g.stroke();
    g.setLineDash([]);
  }
  const words = `budget ${formatBytes(budget)}${isInside ? "" : " (above this picture)"}`;
  const above = isInside && y > y1 + 14;
  halo(g, words, x0 + 6, above ? y - 10 : y + 11, paper); // always here, so that it does not hop when the peak moves
}

export function drawPeak(g, place, x, peak, budget, { paper, ink, font }) {
  const { x0, x1, y1 } = place, y = place.y(peak);
  if (x < x0 - 1 || x > x1 + 1) return;
  const right = x < x0 + 0.7 * (x1 - x0);
  g.font = `600 12px ${font}`;
  g.fillStyle = ink;
  g.strokeStyle = paper;
  g.lineWidth = 2;
  g.beginPath(); g.arc(x, y, 4.5, 0, 7); g.stroke(); g.fill();
  g.textAlign = right ? "left" : "right";
  // Below the budget's label, where the two would meet.
  const meets = budget && Math.abs(y - (budget <= place.top ? place.y(budget) : y1)) < 24 && x < x0 + 190;
  halo(g, `peak ${formatBytes(peak)}`, x + (right ? 9 : -9), meets ? y + 20 : Math.max(y - 6, y1 + 4), paper);
}

// An earlier run over this one: {title, op, totals, edges}.
export function drawOutline(g, place, outline, { paper, ink, font }) {
  const columns = columnsOf(outline, outline.edges, place);
  if (!columns.samples.length) return;
  const ys = columns.samples.map((i) => place.y(outline.totals[i]));
  for (const [color, width, dashes] of [[paper, 3.2, []], [ink, 1.3, [5, 3]]]) {
    g.beginPath();
    stairs(g, columns.xs, ys);
    g.setLineDash(dashes);
    g.strokeStyle = color;
    g.lineWidth = width;
    g.stroke();
  }
  g.setLineDash([]);
  const most = Math.max(...outline.totals), highest = columns.samples.findIndex((i) => outline.totals[i] === most);
  if (highest < 0) return; // its peak is out of sight
  const right = columns.xs[highest] < (place.x0 + place.x1) / 2;
  g.font = `11px ${font}`;
  g.textAlign = right ? "left" : "right";
  g.fillStyle = ink;
  halo(g, `${outline.title}: ${formatBytes(most)}`, columns.xs[highest] + (right ? 8 : -8), Math.max(ys[highest] - 8, place.y1 + 8), paper);
}

// The line of the cursor, and a dot on each group's upper edge.
export function drawCursor(g, place, x, groups, sample, { paper, ink }) {
  const { x0, x1, y0, y1 } = place;
  if (x < x0 - 1 || x > x1 + 1) return;
  g.strokeStyle = ink;
  g.lineWidth = 1.2;
  g.beginPath(); g.moveTo(x, y1 - 6); g.lineTo(x, y0); g.stroke();
  let sum = 0;
  for (const { total, look } of groups) {
    if (!(total[sample] > 0)) continue;
    sum += total[sample];
    g.beginPath();
    g.arc(x, place.y(sum), 3.4, 0, 7);
    g.fillStyle = look[0] === "none" ? paper : look[0];
    g.strokeStyle = paper;
    g.lineWidth = 3;
    g.stroke();
    g.fill();
    g.strokeStyle = ink;
    g.lineWidth = 1;
    g.stroke();
  }
}
