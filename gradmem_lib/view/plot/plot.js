// The memory plot: what a reader sees of a run, and does with it. It moves while a cell runs (`model` is then a widget's),
// and is the same afterwards. A run with blocks (see run.js) also says what lies under the pointer.

import {
  MOST_BATCHES, STRIP, columnsOf, drawAreas, drawAxes, drawBatches, drawBlocks, drawBudget, drawCursor, drawLife, drawOutline,
  drawPeak, drawStrip, fillOf, hatched, placeOf,
} from "./draw.js";
import { decodeFrame, edgesOf, growingAt, runsOf, sampleOf, stepsOf, withBlocks } from "./run.js";
import { GROUPINGS, arrange, lifeOf, stackAt } from "./stack.js";
import { UNITS, formatBytes, grouped, isDark, make, niceStep } from "./words.js";

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a kernel's states in which it cannot answer
const KEYS = [["← →", "move"], ["P", "peak"], ["+ − 0", "zoom"], ["Esc", "let go"]];
const KEYS_OF_BLOCKS = [["↑ ↓", "blocks of a moment"], ["Enter", "pin"], ["G", "regroup"]];
const FEWEST = 4; // operations that a zoomed picture shows, at least

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function batchesInWords(batches) {
  if (!batches.length) return "";
  if (batches.length > MOST_BATCHES) {
    const sizes = batches.map(({ rows }) => rows);
    return `The batch has ${grouped(Math.min(...sizes))} to ${grouped(Math.max(...sizes))} rows. `;
  }
  return `Rows of the batch: ${batches.map(({ op, rows }) => `${grouped(rows)} from operation ${grouped(op)} on`).join(", ")}. `;
}

// An earlier run, drawn as a line over this one.
const outlineOf = (given) => given && { ...given, n: given.op.length, edges: edgesOf(given.op) };

// Half of the distance between two marks of the axis of bytes.
function halfStep(reach, highest) {
  const [, factor] = UNITS.find(([, f]) => highest >= f) || ["B", 1];
  return (niceStep(reach / factor, 4) * factor) / 2;
}

// A row of the table: a swatch and a name. Returns the cell of its bytes.
function addRow(tr, look, name) {
  const th = make("th", "", tr), swatch = make("canvas", "gm-swatch", th);
  th.scope = "row";
  th.title = name;
  make("bdi", "", make("span", "gm-name", th), name);
  swatch.width = 34;
  swatch.height = 28;
  const g = swatch.getContext("2d");
  g.fillStyle = g.createPattern(hatched(look, 2), "repeat");
  g.fillRect(0, 0, 34, 28);
  return make("td", "", tr, "–");
}

// A block as a sentence.
function sentence(run, phases, names, { block, bytes, group }) {
  if (!block) return `${formatBytes(bytes)} of ${group.name}, in small or short-lived storages that have no block of their own.`;
  const during = (i) => `operation ${grouped(run.op[i])}${phases[run.phase[i]] ? ` (${phases[run.phase[i]]})` : ""}`;
  const made = block.start ? `made at ${during(block.start)}` : "there from the start";
  const freed = block.ends ? `freed at ${during(block.stop)}` : "alive at the end";
  const what = [block.tensor, `${formatBytes(block.bytes)} (${grouped(block.bytes)} bytes)`, names[block.category]].filter(Boolean).join(", ");
  const from = [block.module && `of ${block.module}`, block.op && `by ${block.op}`, block.line && `at ${block.line}`].filter(Boolean).join(" ");
  return `${what}${from ? ` ${from}` : ""}; ${made}, ${freed}${block.held ? `; held by ${block.held}` : ""}.`;
}

export function render({ model, el }) {
  const { names, looks, phases, growing } = model.get("appearance"); // a look: colour and hatch
  const budget = model.get("budget"), title = model.get("title"), outline = outlineOf(model.get("outline"));
  const root = make("figure", model.get("small") ? "gm-live gm-small" : "gm-live", el);

  // The parts of the page

  const head = make("div", "gm-head", root), heading = make("div", "gm-title", head), dot = make("span", "gm-dot", heading);
  dot.title = "recording";
  heading.append(title || "Memory by category");
  heading.title = title; // a long one is cut
  const peakBox = make("div", "gm-figure", head), nowBox = make("div", "gm-figure", head);
  make("span", "", nowBox, "now ");
  const nowText = make("b", "", nowBox, "–"), nowPhase = make("span", "", nowBox);
  make("span", "", peakBox, "peak ");
  const peakText = make("b", "", peakBox, "–"), peakPhase = make("span", "", peakBox);

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
  for (const by of GROUPINGS) {
    const button = make("button", "", bar, by);
    button.dataset.by = by;
    button.addEventListener("click", () => regroup(by));
  }
  const table = make("table", "", side);
  const caption = make("caption", "gm-hidden", table), headRow = make("tr", "", make("thead", "", table));
  const what = make("th", "", headRow), when = make("td", "", headRow, "now"), rows = make("tbody", "", table);
  what.scope = "col";
  const foot = make("tfoot", "", table), footRow = make("tr", "", foot);
  make("th", "", footRow, "total").scope = "row";
  const sum = make("td", "", footRow, "–"), growingRow = make("tr", "gm-growing gm-none", foot);
  const growingCell = addRow(growingRow, growing.look, growing.name);
  const key = make("div", "gm-phases", side);
  const keyMarks = phases.map((phase) => {
    if (!phase) return null;
    const item = make("span", "", key), mark = make("i", "", item);
    item.append(phase);
    return mark;
  });
  const read = make("div", "gm-read", root);
  read.setAttribute("aria-live", "polite");

  // What is shown

  let run = null, edges = null, groups = [], cells = new Map(), by = "category", alone = null; // the name of a group
  let cursor = -1, under = null, pinned = null; // a sample, what lies under the pointer there, and a block
  let view = null, lost = false; // from and to, in operations (null: all); whether the kernel went away during the recording
  let place = null, columns = null, boxes = [], base = null, isFresh = false, isMoving = false, request = 0, rest = 0, theme = null;

  const shownGroups = () => (alone === null ? groups : groups.filter((group) => group.name === alone));
  const whole = () => ({ from: edges[0], to: Math.max(edges[run.n], outline ? outline.edges.at(-1) : 0) });

  // A row for each group, from the top of the stack; a click shows it alone.
  function listGroups() {
    const listed = [by, ...groups.map(({ name }) => name)].join("\n");
    bar.classList.toggle("gm-none", !run?.blocks.length);
    if (rows.dataset.listed === listed) return; // a frame of the same groups: a row keeps the focus
    rows.dataset.listed = listed;
    rows.replaceChildren();
    cells = new Map();
    caption.textContent = `Bytes by ${by}`;
    what.textContent = by;
    for (const group of groups.toReversed()) {
      if (group.name === growing.name) continue; // in the foot: it is a part of the others
      const tr = make("tr", "", rows);
      cells.set(group.name, addRow(tr, group.look, group.name));
      tr.tabIndex = 0;
      tr.setAttribute("role", "button");
      tr.setAttribute("aria-pressed", String(group.name === alone));
      tr.addEventListener("click", () => isolate(group.name));
      tr.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        isolate(group.name);
      });
    }
    for (const button of bar.children) button.setAttribute("aria-pressed", String(button.dataset.by === by));
  }
  function regroup(to) {
    by = to;
    alone = under = null;
    groups = arrange(run, by, { names, looks, growing });
    listGroups();
    canvas.dataset.by = by;
    change();
  }
  function isolate(name) {
    alone = alone === name ? null : name;
    under = null;
    for (const [group, cell] of cells) cell.parentNode.setAttribute("aria-pressed", String(group === alone));
    canvas.dataset.alone = alone ?? "";
    change();
  }

  function hint() {
    read.textContent = lost ? "The recording stopped: the kernel has ended. " : "";
    for (const [keys, meaning] of run?.blocks.length ? [...KEYS, ...KEYS_OF_BLOCKS] : KEYS) {
      make("kbd", "", read, keys);
      read.append(` ${meaning}   `);
    }
  }

  function words() {
    const { current, peak } = run, atPeak = run.finished && cursor < 0;
    nowText.textContent = formatBytes(current.total);
    nowPhase.textContent = phases[current.phase] ? ` ${phases[current.phase]}` : "";
    peakText.textContent = formatBytes(peak.total);
    peakText.classList.toggle("gm-over", budget > 0 && peak.total > budget);
    peakPhase.textContent = ` ${grouped(peak.total)} bytes` + (phases[peak.phase] ? `, ${phases[peak.phase]}` : "");
    dot.style.display = run.finished || lost ? "none" : "";
    canvas.dataset.recording = !run.finished && !lost;
    head.classList.toggle("gm-done", run.finished);
    let shown = run.n - 1; // the sample in the table: the cursor's, the peak's, or the last one
    if (cursor >= 0) shown = cursor;
    else if (run.finished) shown = sampleOf(run, peak.op);
    const exact = cursor >= 0 ? null : atPeak ? peak : current; // samples are float32 while a cell runs
    when.textContent = cursor >= 0 ? `operation ${grouped(run.op[cursor])}` : atPeak ? "at the peak" : "now";
    for (const group of groups) {
      const c = by === "category" ? names.indexOf(group.name) : -1;
      const nbytes = c < 0 ? group.total[shown] : exact ? exact.parts[c] : run.parts[c][shown];
      if (cells.has(group.name)) cells.get(group.name).textContent = formatBytes(nbytes);
    }
    sum.textContent = formatBytes(exact ? exact.total : run.totals[shown]);
    growingRow.classList.toggle("gm-none", run.growing === null);
    growingCell.textContent = formatBytes(growingAt(run, shown));
    canvas.setAttribute("aria-label",
      `Memory${title ? " of " + title : ""} by ${by}. Peak ${formatBytes(peak.total)} (${grouped(peak.total)} bytes) at operation ` +
      `${grouped(peak.op)}${phases[peak.phase] ? ", " + phases[peak.phase] : ""}. ` +
      (run.finished ? "" : `Current ${formatBytes(current.total)}. `) +
      (run.growing ? `${formatBytes(growingAt(run, shown))} of it grow from step to step. ` : "") + batchesInWords(run.batches) +
      (budget ? `Budget ${formatBytes(budget)}. ` : "") + "Arrow keys read single operations, P jumps to the peak." +
      (run.blocks.length ? " Up and down read the blocks of a moment, Enter pins one, plus and minus zoom." : ""));
  }

  // What the line below the picture says: of the cursor, of what lies under the pointer, and of what is pinned.
  function announce() {
    tip.hidden = !under;
    if (cursor < 0 && !pinned) return hint();
    read.replaceChildren();
    if (cursor >= 0) {
      const parts = names.map((name, c) => [run.parts[c][cursor], name]).filter(([n]) => n > 0).toSorted((a, b) => b[0] - a[0]);
      const growingNow = growingAt(run, cursor);
      make("div", "", read, `operation ${grouped(run.op[cursor])}${phases[run.phase[cursor]] ? ", " + phases[run.phase[cursor]] : ""}: ` +
        `${formatBytes(run.totals[cursor])}` +
        (parts.length ? ", of which " + parts.map(([n, name]) => `${name} ${formatBytes(n)}`).join(", ") : "") +
        (growingNow > 0 ? `; ${formatBytes(growingNow)} of it grow from step to step` : ""));
    }
    if (under) make("div", "gm-block", read, sentence(run, phases, names, under));
    if (pinned && under?.block !== pinned) make("div", "gm-block", read, `Pinned: ${sentence(run, phases, names, { block: pinned })}`);
  }

  function showTip() {
    if (!under || !place || cursor < 0) return;
    const { block, bytes, low } = under, x = place.x(edges[cursor]), y = place.y(low + bytes / 2);
    tip.replaceChildren();
    make("b", "", tip, `${formatBytes(bytes)} ${block?.tensor ?? ""}`);
    for (const fact of block ? [block.module, block.line] : [under.group.name, "small or short-lived"]) if (fact) make("div", "", tip, fact);
    tip.style.left = `${x > plot.clientWidth / 2 ? Math.max(x - tip.offsetWidth - 14, 0) : x + 14}px`;
    tip.style.top = `${clamp(y - tip.offsetHeight / 2, 2, Math.max(plot.clientHeight - tip.offsetHeight - 2, 2))}px`;
  }

  // Drawing

  function readTheme() {
    const style = getComputedStyle(root), value = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    const ink = style.color;
    // Phases by index: idle, forward, backward, optimizer step; from faint to strong on either background.
    const tones = isDark(ink) ? [null, "#dfe3ea", "#7b8495", "#262c38"] : [null, "#394152", "#8b95a8", "#eceff4"];
    keyMarks.forEach((mark, i) => { if (mark) mark.style.background = tones[i]; });
    return { ink, tones, paper: value("--gm-paper", "#fff"), line: value("--gm-line", "rgba(128,136,150,.35)"), font: style.fontFamily };
  }

  function drawBase(g, ratio, width, height) {
    const all = whole(), sight = view ?? all, shown = shownGroups();
    const limit = budget && alone === null ? budget : 0;
    let highest = Math.max(...run.totals, 1);
    if (alone === null) highest = Math.max(highest, run.peak.total, model.get("top"), outline ? Math.max(...outline.totals) : 0);
    else highest = Math.max(...(shown[0]?.total ?? [1]), 1);
    const reach = Math.max(highest, limit <= 2.5 * highest ? limit : 0) * 1.08;
    const half = halfStep(reach, highest), top = Math.ceil(reach / half) * half; // so that the axis does not tremble
    place = placeOf(width, height, sight, top);
    columns = columnsOf(run, edges, place);
    const phaseRuns = runsOf(run.phase, edges), steps = stepsOf(phaseRuns);
    boxes = steps ?? phaseRuns;
    key.classList.toggle("gm-steps", steps !== null);
    drawAxes(g, place, sight, all, theme, highest);
    drawAreas(g, shown, columns, place, shown.map(({ look }) => fillOf(g, look, ratio)), theme);
    if (run.blocks.length && !isMoving) drawBlocks(g, shown, columns, place, theme);
    drawStrip(g, place, boxes, steps !== null, phases, theme);
    drawBatches(g, place, run.batches, theme);
    if (alone !== null) return;
    if (outline) drawOutline(g, place, outline, theme);
    if (budget) drawBudget(g, place, budget, theme);
    drawPeak(g, place, place.x(edges[sampleOf(run, run.peak.op)]), run.peak.total, budget, theme);
  }

  function draw() {
    request = 0;
    const width = plot.clientWidth, height = plot.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!width || !height) return;
    const before = theme;
    theme = readTheme();
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (!base || base.width !== size[0] || base.height !== size[1] || before?.ink !== theme.ink || before?.paper !== theme.paper) isFresh = false;
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    canvas.dataset.points = run ? run.n : 0;
    canvas.dataset.ink = theme.ink;
    if (!run || !run.n) {
      g.fillStyle = theme.ink;
      g.globalAlpha = 0.6;
      g.textAlign = "center";
      g.font = `13px ${theme.font}`;
      g.fillText("waiting for the first operation", width / 2, height / 2);
      g.globalAlpha = 1;
      return;
    }
    words();
    if (!isFresh) {
      base = document.createElement("canvas");
      [base.width, base.height] = size;
      const own = base.getContext("2d");
      own.scale(ratio, ratio);
      drawBase(own, ratio, width, height);
      isFresh = true;
    }
    g.drawImage(base, 0, 0, width, height);
    const shown = shownGroups();
    for (const block of new Set([under?.block, pinned])) {
      if (block) drawLife(g, lifeOf(shown, block, columns.samples), block.bytes, columns, place, theme, block === pinned);
    }
    if (cursor >= 0) drawCursor(g, place, place.x(edges[cursor]), shown, cursor, theme);
    showTip();
  }
  const schedule = () => { if (!request) request = requestAnimationFrame(draw); };
  const change = () => {
    isFresh = false;
    announce();
    schedule();
  };
  // While a picture moves, it is drawn without the lines between blocks.
  const move = () => {
    isMoving = true;
    clearTimeout(rest);
    rest = setTimeout(() => { isMoving = false; change(); }, 150);
    change();
  };

  // Frames of a cell that runs, then the blocks of one that has ended

  function take(next) {
    const op = cursor >= 0 && run ? run.op[cursor] : null;
    run = next;
    edges = run && run.n ? edgesOf(run.op) : null;
    cursor = op === null || !edges ? -1 : sampleOf(run, op);
    under = null;
    if (edges) groups = arrange(run, by, { names, looks, growing });
    listGroups();
    change();
  }
  async function arrived() {
    const frame = decodeFrame(model.get("frame"), names.length);
    canvas.dataset.frames = +(canvas.dataset.frames || 0) + 1;
    take(frame);
    const packed = model.get("blocks");
    if (!frame?.n || !packed?.byteLength) return;
    take(await withBlocks(frame, packed));
    canvas.dataset.blocks = run.blocks.length;
  }
  const stopped = () => {
    if (lost || run?.finished) return;
    lost = true;
    dot.style.display = "none";
    canvas.dataset.recording = false;
    root.classList.add("gm-lost");
    hint();
    schedule();
  };

  // Moves of the pointer and of the keys

  function moveTo(sample, at = null) {
    cursor = sample;
    under = at;
    if (view && cursor >= 0 && (edges[cursor] < view.from || edges[cursor] > view.to)) lookAt(edges[cursor] - (view.to - view.from) / 2, view.to - view.from);
    announce();
    schedule();
  }
  function pin(block) {
    pinned = block === pinned ? null : block;
    canvas.dataset.pinned = pinned ? pinned.number : "";
    announce();
    schedule();
  }
  function lookAt(from, span) {
    const all = whole(), most = all.to - all.from;
    const width = clamp(span, Math.min(FEWEST, most), most), start = clamp(from, all.from, all.to - width);
    view = width === most ? null : { from: start, to: start + width };
    canvas.dataset.view = view ? `${Math.round(view.from)} ${Math.round(view.to)}` : "";
    move();
  }
  function zoom(factor, x = (place.x0 + place.x1) / 2) {
    const now = view ?? whole(), span = now.to - now.from, at = place.op(clamp(x, place.x0, place.x1));
    lookAt(at - ((at - now.from) / span) * span * factor, span * factor);
  }
  function pan(pixels) {
    const now = view ?? whole(), span = now.to - now.from;
    lookAt(now.from - (pixels / (place.x1 - place.x0)) * span, span);
  }
  // The sample and the block at a place of the canvas.
  function hit(x, y) {
    const { x0, x1, y0, y1 } = place;
    if (x < x0 - 4 || x > x1 + 4) return null;
    const k = columns.xs.findLastIndex((left) => left <= x), sample = columns.samples[clamp(k, 0, columns.samples.length - 1)];
    const nbytes = place.bytes(y);
    const stack = run.blocks.length && y >= y1 && y <= y0 ? stackAt(shownGroups(), sample) : [];
    return { sample, at: stack.find(({ low, bytes }) => low <= nbytes && nbytes < low + bytes) ?? null };
  }

  const inTime = (step) => () => {
    let i = cursor < 0 ? (step > 0 ? 0 : run.n - 1) : clamp(cursor + step, 0, run.n - 1);
    const one = Math.sign(step), op = cursor < 0 ? null : run.op[cursor];
    while (run.op[i] === op && i + one >= 0 && i + one < run.n) i += one; // another sample of this operation
    moveTo(sampleOf(run, run.op[i]), null);
  };
  function climb(step) {
    const sample = cursor < 0 ? sampleOf(run, run.peak.op) : cursor, stack = stackAt(shownGroups(), sample);
    const here = stack.findIndex(({ low }) => low === under?.low), start = step > 0 ? 0 : stack.length - 1;
    moveTo(sample, stack[here < 0 ? start : clamp(here + step, 0, stack.length - 1)] ?? null);
  }
  function letGo() {
    if (pinned) return pin(pinned);
    if (alone !== null) return isolate(alone);
    moveTo(-1);
  }
  canvas.addEventListener("keydown", (event) => {
    if (!run || !run.n || !place || event.ctrlKey || event.metaKey || event.altKey) return;
    const leap = event.shiftKey ? Math.max(1, Math.round(run.n / 20)) : 1, many = event.shiftKey ? 10 : 1;
    const next = GROUPINGS[(GROUPINGS.indexOf(by) + 1) % GROUPINGS.length];
    const actions = {
      arrowright: inTime(leap), arrowleft: inTime(-leap),
      home: () => moveTo(0), end: () => moveTo(run.n - 1), p: () => moveTo(sampleOf(run, run.peak.op)),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => lookAt(0, Infinity), escape: letGo,
    };
    if (run.blocks.length) {
      Object.assign(actions, {
        arrowup: () => climb(many), arrowdown: () => climb(-many), g: () => regroup(next), enter: () => { if (under?.block) pin(under.block); },
      });
    }
    const action = actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });

  // Of the pointers that are down: where each one is. One pans, two pinch.
  const down = new Map();
  let isDrag = false, isOver = false; // the pointer has moved here: a page that scrolls by goes on to scroll
  const xOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const yOf = (event) => event.clientY - canvas.getBoundingClientRect().top;
  canvas.addEventListener("pointerdown", (event) => {
    down.set(event.pointerId, xOf(event));
    isDrag = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!place || !run || !run.n) return;
    const x = xOf(event), from = down.get(event.pointerId);
    if (event.movementX || event.movementY) isOver = true;
    if (from === undefined) {
      const found = hit(x, yOf(event));
      canvas.style.cursor = stepUnder(x, yOf(event)) ? "pointer" : "";
      return moveTo(found ? found.sample : -1, found?.at);
    }
    if (!isDrag && Math.abs(x - from) < 4) return;
    isDrag = true;
    down.set(event.pointerId, x);
    if (down.size === 1) return pan(x - from);
    const other = [...down].find(([id]) => id !== event.pointerId)[1];
    zoom(Math.abs(from - other) / Math.max(Math.abs(x - other), 1), other);
  });
  function stepUnder(x, y) {
    if (!place || y < place.y1 - STRIP || y > place.y1 - STRIP + 15) return null;
    const op = place.op(x);
    return boxes.find(({ from, to }) => from <= op && op < to) ?? null;
  }
  canvas.addEventListener("pointerup", (event) => {
    const wasDown = down.delete(event.pointerId);
    if (!wasDown || isDrag || !place || !run?.n) return;
    const x = xOf(event), y = yOf(event), step = stepUnder(x, y);
    if (step) return lookAt(step.from, step.to - step.from);
    const block = hit(x, y)?.at?.block;
    if (block) pin(block);
  });
  canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
  canvas.addEventListener("dblclick", () => { if (run?.n) lookAt(0, Infinity); });
  canvas.addEventListener("wheel", (event) => {
    const isAll = view === null && event.deltaY > 0; // nothing to zoom out to: the page scrolls
    if (!place || !run?.n || isAll || !(isOver || event.ctrlKey)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(-event.deltaX);
    else zoom(1.0015 ** event.deltaY, xOf(event));
  }, { passive: false });
  canvas.addEventListener("pointerleave", () => {
    isOver = false;
    if (document.activeElement !== canvas) moveTo(-1);
  });
  canvas.addEventListener("blur", () => moveTo(-1));

  const resized = new ResizeObserver(() => { isFresh = false; schedule(); });
  resized.observe(plot);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", schedule);
  // A new theme arrives as a transition of the colour, as an attribute of the page, or as a style sheet.
  root.addEventListener("transitionend", schedule);
  const restyled = new MutationObserver(schedule);
  restyled.observe(document.body, { attributes: true });
  document.head.addEventListener("load", schedule, true);
  model.on("change:frame", arrived);
  model.on("change:top", change);
  const kernel = model.widget_manager?.kernel;
  const kernelState = (_, status) => { if (GONE.includes(status)) stopped(); };
  kernel?.statusChanged?.connect(kernelState);
  kernel?.disposed?.connect(stopped);
  arrived();
  return () => {
    model.off("change:frame", arrived);
    model.off("change:top", change);
    kernel?.statusChanged?.disconnect(kernelState);
    kernel?.disposed?.disconnect(stopped);
    resized.disconnect();
    restyled.disconnect();
    document.head.removeEventListener("load", schedule, true);
    dark.removeEventListener("change", schedule);
    cancelAnimationFrame(request);
    clearTimeout(rest);
  };
}
