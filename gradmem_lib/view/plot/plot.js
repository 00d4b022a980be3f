// The memory plot: what a reader sees of a run, and does with it. It moves while a cell runs (`model` is then a widget's),
// and is the same afterwards. A run with blocks (see run.js) also says what lies under the pointer.

import {
  STRIP, STRIP_HEIGHT, columnsOf, drawAreas, drawAxes, drawBatches, drawBlocks, drawBudget, drawCursor, drawLife, drawOutline, drawPeak,
  drawStrip, fillOf, placeOf, topOf,
} from "./draw.js";
import { listen } from "./moves.js";
import { addRow, buildParts } from "./parts.js";
import { decodeFrame, edgesOf, growingAt, runsOf, sampleOf, stepsOf, withBlocks } from "./run.js";
import { blockInWords, momentInWords, pictureInWords } from "./say.js";
import { GROUPINGS, arrange, arrangeOne, lifeOf, stackAt } from "./stack.js";
import { formatBytes, grouped, isDark, make } from "./words.js";

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a kernel's states in which it cannot answer
const FEWEST = 4; // operations that a zoomed picture shows, at least
const MOVES_FOR = 150; // milliseconds after the last pan or zoom

const NOTHING = { n: 0, parts: [], totals: [], growing: null, blocks: [] };

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// An earlier run, drawn as a line over this one.
const outlineOf = (given) => given && { ...given, n: given.op.length, edges: edgesOf(given.op) };

export function render({ model, el }) {
  const appearance = model.get("appearance"), { names, phases, growing } = appearance;
  const budget = model.get("budget"), title = model.get("title"), outline = outlineOf(model.get("outline"));
  const page = buildParts(el, { title, isSmall: model.get("small"), growing, phases }), { canvas } = page;

  // What is shown

  let run = null, edges = null, groups = [], cells = new Map(), by = "category";
  let alone = null, shown = []; // the name of a group, and it or all of them
  let cursor = -1, under = null, pinned = null; // a sample, what lies under the pointer there, and a block
  let view = null, lost = false; // from and to, in operations (null: all); whether the kernel went away during the recording
  let place = null, columns = null, boxes = [], base = null, theme = null; // of the last picture: see drawBase
  let isFresh = false, isMoving = false, request = 0, settling = 0;

  const show = () => { shown = alone === null ? groups : arrangeOne(run ?? NOTHING, alone, by, appearance); };
  const whole = () => ({ from: edges[0], to: Math.max(edges[run.n], outline ? outline.edges.at(-1) : 0) });
  const cursorX = () => Math.max(place.x(edges[cursor]), place.x0); // a sample in sight may begin before it
  const peakSample = () => sampleOf(run, run.peak.op);

  // A row for each group, from the top of the stack; a click shows it alone.
  function listGroups() {
    const listed = [by, ...groups.map(({ name }) => name)].join("\n");
    page.bar.classList.toggle("gm-none", !run?.blocks.length);
    if (page.rows.dataset.listed === listed) return; // a frame of the same groups: a row keeps the focus
    page.rows.dataset.listed = listed;
    page.rows.replaceChildren();
    cells = new Map();
    page.caption.textContent = `Bytes by ${by}`;
    page.what.textContent = by;
    for (const { name, look } of groups.toReversed()) {
      if (name === growing.name) continue; // in the foot: it is a part of the others
      const tr = make("tr", "", page.rows);
      cells.set(name, addRow(tr, look, name));
      tr.tabIndex = 0;
      tr.setAttribute("role", "button");
      tr.setAttribute("aria-pressed", String(name === alone));
      tr.addEventListener("click", () => isolate(name));
      tr.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        isolate(name);
      });
    }
    for (const button of page.bar.children) button.setAttribute("aria-pressed", String(button.dataset.by === by));
  }
  function regroup(to) {
    if (to === by) return alone === null ? undefined : isolate(alone);
    by = to;
    alone = under = null;
    canvas.dataset.alone = "";
    groups = arrange(run, by, appearance);
    show();
    listGroups();
    canvas.dataset.by = by;
    change();
  }
  function isolate(name) {
    alone = alone === name ? null : name;
    show();
    under = null;
    for (const [group, cell] of cells) cell.parentNode.setAttribute("aria-pressed", String(group === alone));
    canvas.dataset.alone = alone ?? "";
    change();
  }

  // What the table shows: the moment of the cursor, of a finished run's peak, or of now.
  function moment() {
    if (cursor >= 0) {
      const parts = run.parts.map((part) => part[cursor]);
      return { label: `operation ${grouped(run.op[cursor])}`, sample: cursor, total: run.totals[cursor], parts };
    }
    if (run.finished) return { label: "at the peak", sample: peakSample(), ...run.peak };
    return { label: "now", sample: run.n - 1, ...run.current };
  }

  function writeFigures() {
    const { current, peak } = run;
    page.now.bytes.textContent = formatBytes(current.total);
    page.now.more.textContent = phases[current.phase] ? ` ${phases[current.phase]}` : "";
    page.peak.bytes.textContent = formatBytes(peak.total);
    page.peak.bytes.classList.toggle("gm-over", budget > 0 && peak.total > budget);
    page.peak.more.textContent = ` ${grouped(peak.total)} bytes` + (phases[peak.phase] ? `, ${phases[peak.phase]}` : "");
    page.dot.style.display = run.finished || lost ? "none" : "";
    canvas.dataset.recording = !run.finished && !lost;
    page.head.classList.toggle("gm-done", run.finished);
    const { label, sample, total, parts } = moment();
    page.when.textContent = label;
    page.sum.textContent = formatBytes(total);
    for (const group of groups) {
      const c = by === "category" ? names.indexOf(group.name) : -1; // a category's bytes are known exactly
      if (cells.has(group.name)) cells.get(group.name).textContent = formatBytes(c >= 0 ? parts[c] : group.total[sample]);
    }
    page.growingRow.classList.toggle("gm-none", run.growing === null);
    page.growingCell.textContent = formatBytes(growingAt(run, sample));
    canvas.setAttribute("aria-label", pictureInWords(run, peakSample(), { title, by, budget }, appearance));
  }

  // The lines below the picture: of the cursor, of what lies there, and of what is pinned; or which keys there are.
  function announce() {
    page.tip.hidden = !under;
    const said = [];
    if (lost) said.push("The recording stopped: the kernel has ended.");
    if (cursor >= 0) said.push(momentInWords(run, cursor, appearance));
    if (under) said.push(blockInWords(run, under, appearance));
    if (pinned && under?.block !== pinned) said.push(`Pinned: ${blockInWords(run, { block: pinned }, appearance)}`);
    page.keys.hidden = cursor >= 0 || pinned !== null;
    page.keysOfBlocks.hidden = !run?.blocks.length;
    if (page.read.dataset.said === said.join()) return; // a screen reader hears it once
    page.read.dataset.said = said.join();
    page.read.replaceChildren();
    for (const words of said) make("div", words.startsWith("operation ") ? "" : "gm-block", page.read, words);
  }

  function showTip() {
    if (!under || cursor < 0) return;
    const { plot, tip } = page, { block, bytes, low, group } = under, x = cursorX(), y = place.y(low + bytes / 2);
    tip.style.left = "0"; // so that it is as wide as its words
    const facts = block ? [block.module, block.line] : [group.name, "small or short-lived"];
    tip.replaceChildren();
    make("b", "", tip, `${formatBytes(bytes)} ${block?.tensor ?? ""}`);
    for (const fact of facts.filter(Boolean)) make("div", "", tip, fact);
    tip.style.left = `${x > plot.clientWidth / 2 ? Math.max(x - tip.offsetWidth - 14, 0) : x + 14}px`;
    tip.style.top = `${clamp(y - tip.offsetHeight / 2, 2, Math.max(plot.clientHeight - tip.offsetHeight - 2, 2))}px`;
  }

  // Drawing

  function readTheme() {
    const style = getComputedStyle(page.root), value = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    const ink = style.color;
    // Phases by index: idle, forward, backward, optimizer step; from faint to strong on either background.
    const tones = isDark(ink) ? [null, "#dfe3ea", "#7b8495", "#262c38"] : [null, "#394152", "#8b95a8", "#eceff4"];
    page.phaseMarks.forEach((mark, i) => { if (mark) mark.style.background = tones[i]; });
    return { ink, tones, paper: value("--gm-paper", "#fff"), line: value("--gm-line", "rgba(128,136,150,.35)"), font: style.fontFamily };
  }

  // The most bytes that the axis has to reach; a budget far above the run would flatten the picture.
  function highestOf() {
    if (alone !== null) return Math.max(...shown[0].total, 1);
    return Math.max(...run.totals, 1, run.peak.total, model.get("top"), outline ? Math.max(...outline.totals) : 0);
  }

  // All but what follows the pointer.
  function drawBase(g, ratio, width, height) {
    const all = whole(), sight = view ?? all, highest = highestOf(), isAll = alone === null;
    place = placeOf(width, height, sight, topOf(highest, isAll ? budget : 0));
    columns = columnsOf(run, edges, place);
    const phaseRuns = runsOf(run.phase, edges), steps = stepsOf(phaseRuns);
    boxes = steps ?? phaseRuns;
    page.key.classList.toggle("gm-steps", steps !== null);
    drawAxes(g, place, sight, all, theme, highest);
    drawAreas(g, shown, columns, place, shown.map(({ look }) => fillOf(g, look, ratio)), theme);
    if (run.blocks.length && !isMoving) drawBlocks(g, shown, columns, place, theme);
    drawStrip(g, place, boxes, steps !== null, phases, theme);
    drawBatches(g, place, run.batches, theme);
    if (isAll && outline) drawOutline(g, place, outline, theme);
    if (isAll && budget) drawBudget(g, place, budget, theme);
    if (isAll) drawPeak(g, place, place.x(edges[peakSample()]), run.peak.total, budget, theme);
  }

  function draw() {
    request = 0;
    const width = page.plot.clientWidth, height = page.plot.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!width || !height) return;
    const before = theme, size = [Math.round(width * ratio), Math.round(height * ratio)];
    theme = readTheme();
    if (canvas.width !== size[0] || canvas.height !== size[1]) {
      [canvas.width, canvas.height] = size;
      isFresh = false;
    }
    if (before?.ink !== theme.ink || before?.paper !== theme.paper) isFresh = false;
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    canvas.dataset.points = run ? run.n : 0;
    canvas.dataset.ink = theme.ink;
    if (!run?.n) {
      const words = run?.finished ? "not measured to its end" : "waiting for the first operation";
      page.dot.style.display = run?.finished || lost ? "none" : "";
      canvas.dataset.recording = !run?.finished && !lost;
      canvas.setAttribute("aria-label", `Memory${title ? ` of ${title}` : ""}: ${words}.`);
      g.fillStyle = theme.ink;
      g.globalAlpha = 0.6;
      g.textAlign = "center";
      g.font = `13px ${theme.font}`;
      g.fillText(words, width / 2, height / 2);
      g.globalAlpha = 1;
      return;
    }
    writeFigures();
    if (!isFresh) {
      base = document.createElement("canvas");
      [base.width, base.height] = size;
      const own = base.getContext("2d");
      own.scale(ratio, ratio);
      drawBase(own, ratio, width, height);
      isFresh = true;
    }
    g.drawImage(base, 0, 0, width, height);
    for (const block of new Set([under?.block, pinned])) {
      if (block) drawLife(g, lifeOf(shown, block, columns.samples), block.bytes, columns, place, theme, block === pinned);
    }
    if (run.blocks.length) canvas.dataset.drawn = run.blocks.length;
    if (cursor >= 0) drawCursor(g, place, cursorX(), shown, cursor, theme);
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
    clearTimeout(settling);
    settling = setTimeout(() => { isMoving = false; change(); }, MOVES_FOR);
    change();
  };

  // Frames of a cell that runs, then the blocks of one that has ended

  function take(next) {
    const op = cursor >= 0 && run ? run.op[cursor] : null;
    run = next;
    edges = run?.n ? edgesOf(run.op) : null;
    cursor = op === null || !edges ? -1 : sampleOf(run, op);
    under = pinned = place = null; // of the samples and the blocks before
    groups = arrange(run ?? NOTHING, by, appearance);
    show();
    listGroups();
    change();
  }
  async function arrived() {
    const frame = decodeFrame(model.get("frame"), names.length), packed = model.get("blocks");
    canvas.dataset.frames = +(canvas.dataset.frames || 0) + 1;
    take(frame);
    if (!frame?.n || !packed?.byteLength) return;
    take(await withBlocks(frame, packed));
  }
  const stopped = () => {
    if (lost || run?.finished) return;
    lost = true;
    page.dot.style.display = "none";
    canvas.dataset.recording = false;
    page.root.classList.add("gm-lost");
    change();
  };

  // What a reader does with it

  // The cursor goes to a sample, and to what lies there (see stackAt), if any.
  function moveTo(sample, at = null) {
    cursor = sample;
    under = at;
    if (view && cursor >= 0 && (edges[cursor + 1] <= view.from || edges[cursor] >= view.to)) {
      lookAt(edges[cursor] - (view.to - view.from) / 2, view.to - view.from);
    }
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
    const all = whole(), most = all.to - all.from, width = clamp(span, Math.min(FEWEST, most), most);
    const start = clamp(from, all.from, all.to - width);
    view = width === most ? null : { from: start, to: start + width };
    canvas.dataset.view = view ? `${Math.round(view.from)} ${Math.round(view.to)}` : "";
    move();
  }
  // The sample at a place of the canvas, and what lies there.
  function hit(x, y) {
    const { x0, x1, y0, y1 } = place;
    if (x < x0 - 4 || x > Math.min(x1, columns.xs.at(-1)) + 4) return { sample: -1 };
    const k = columns.xs.findLastIndex((left) => left <= x), sample = columns.samples[clamp(k, 0, columns.samples.length - 1)];
    const stack = run.blocks.length && y >= y1 && y <= y0 ? stackAt(shown, sample) : [], nbytes = place.bytes(y);
    return { sample, at: stack.find(({ low, bytes }) => low <= nbytes && nbytes < low + bytes) };
  }
  // The phase or the step in the strip.
  function boxAt(x, y) {
    const top = place.y1 - STRIP, op = place.op(x);
    return y < top || y > top + STRIP_HEIGHT ? undefined : boxes.find(({ from, to }) => from <= op && op < to);
  }

  listen(canvas, {
    isReady: () => place !== null && Boolean(run?.n),
    isWhole: () => view === null,
    step(direction, many) {
      const op = cursor < 0 ? null : run.op[cursor], leap = many ? Math.max(1, Math.round(run.n / 20)) : 1;
      let i = clamp(cursor + direction * leap, 0, run.n - 1);
      if (cursor < 0) i = direction > 0 ? 0 : run.n - 1;
      while (run.op[i] === op && i + direction >= 0 && i + direction < run.n) i += direction; // another sample of this operation
      moveTo(sampleOf(run, run.op[i]));
    },
    climb(direction, many) {
      if (!run.blocks.length) return;
      const sample = cursor < 0 ? peakSample() : cursor, stack = stackAt(shown, sample);
      const here = stack.findIndex(({ low }) => low === under?.low), leap = many ? 10 : 1;
      let next = clamp(here + direction * leap, 0, stack.length - 1);
      if (here < 0) next = direction > 0 ? 0 : stack.length - 1;
      moveTo(sample, stack[next]);
    },
    toStart: () => moveTo(0),
    toEnd: () => moveTo(run.n - 1),
    toPeak: () => moveTo(peakSample()),
    leave: () => moveTo(-1),
    letGo() {
      if (pinned) return pin(pinned);
      if (alone !== null) return isolate(alone);
      moveTo(-1);
    },
    pinUnder() { if (under?.block) pin(under.block); },
    regroup() { if (run.blocks.length) regroup(GROUPINGS[(GROUPINGS.indexOf(by) + 1) % GROUPINGS.length]); },
    showAll() { if (run?.n) lookAt(0, Infinity); },
    zoom(factor, x = (place.x0 + place.x1) / 2) {
      const now = view ?? whole(), span = now.to - now.from, all = whole();
      const wide = clamp(span * factor, Math.min(FEWEST, all.to - all.from), all.to - all.from);
      const share = clamp((x - place.x0) / (place.x1 - place.x0), 0, 1); // what lies there stays there
      lookAt(now.from + share * (span - wide), wide);
    },
    pan(pixels) {
      const now = view ?? whole(), span = now.to - now.from;
      lookAt(now.from - (pixels / (place.x1 - place.x0)) * span, span);
    },
    point(x, y) {
      const { sample, at } = hit(x, y);
      canvas.style.cursor = boxAt(x, y) ? "pointer" : "";
      moveTo(sample, at);
    },
    click(x, y) {
      const box = boxAt(x, y), { sample, at } = hit(x, y);
      if (box) return lookAt(box.from, box.to - box.from);
      moveTo(sample, at);
      if (at?.block) pin(at.block);
    },
  });
  for (const button of page.bar.children) button.addEventListener("click", () => regroup(button.dataset.by));

  // What else changes the picture: its size, the page's colours, and the kernel

  const resized = new ResizeObserver(() => { isFresh = false; schedule(); });
  resized.observe(page.plot);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", schedule);
  // A new theme arrives as a transition of the colour, as an attribute of the page, or as a style sheet.
  page.root.addEventListener("transitionend", schedule);
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
    clearTimeout(settling);
  };
}
