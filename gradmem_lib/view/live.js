// The drawing half of the live plot. One frame (see encode_frame in live.py) holds the whole picture.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const PAD = { left: 52, right: 14, top: 38, bottom: 38 };
const STRIP = 21; // the strip begins so far above the areas
const MOST_BATCHES = 12; // marks of changes of the batch's size; more would hide the picture
const ALARM = "#e0483f";
const INK = "#6f7787"; // as in style.py: it reads on a light and on a dark page
const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a kernel's states in which it cannot answer
const SHORT = ["", "fwd", "bwd", "step"]; // phases by index, where the strip is too narrow for their names

// Ties go to the even digit, as in Python, so that the moving and the still picture say the same.
function twoDigits(x) {
  const hundredths = Math.round(x * 100), tie = (x * 100) % 1 === 0.5;
  return ((tie && hundredths % 2 ? hundredths - 1 : hundredths) / 100).toFixed(2);
}
function formatBytes(n) {
  for (const [unit, factor] of UNITS) if (n >= factor) return `${twoDigits(n / factor)} ${unit}`;
  return `${Math.round(n)} B`;
}
const grouped = (n) => Math.round(n).toLocaleString("en-US");

function niceStep(span, parts) {
  const wanted = Math.max(span, 1e-9) / parts, power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= wanted * 0.8);
}

function isDark(color) {
  const probe = isDark.context || (isDark.context = document.createElement("canvas").getContext("2d"));
  probe.fillStyle = "#000"; probe.fillStyle = color;
  const text = probe.fillStyle;
  const [r, g, b] = text[0] === "#" ? [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)) : text.match(/[\d.]+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b < 110;
}

// Where phases are too many to tell apart: the steps, each up to the end of an optimizer step, numbered from 1.
function stepsOf(runs) {
  if (runs.length <= 24) return null;
  const steps = [];
  let from = runs[0].from;
  for (const run of runs) {
    if (run.phase !== 3) continue;
    steps.push({ number: steps.length + 1, from, to: run.to });
    from = run.to;
  }
  return steps.length > 1 ? steps : null;
}

// What follows the rows of a frame: the bytes that grow, by category (null if none do), and the sizes of the batch.
function decodeMarks(marks, n) {
  const count = marks.length ? marks[0] : 0, pairs = marks.subarray(1 + count * n), batches = [];
  const row = (i) => marks.subarray(1 + i * n, 1 + (i + 1) * n);
  const growing = count ? Array.from({ length: count }, (_, i) => row(i)) : null;
  for (let i = 0; i + 1 < pairs.length; i += 2) batches.push({ op: pairs[i], rows: pairs[i + 1] });
  return { growing, batches };
}

// How many bytes grow at sample number i.
const growingAt = (frame, i) => (frame.growing ? frame.growing.reduce((sum, row) => sum + row[i], 0) : 0);

function batchesInWords(batches) {
  if (!batches.length) return "";
  if (batches.length > MOST_BATCHES) {
    const sizes = batches.map(({ rows }) => rows);
    return `The batch has ${grouped(Math.min(...sizes))} to ${grouped(Math.max(...sizes))} rows. `;
  }
  return `Rows of the batch: ${batches.map(({ op, rows }) => `${grouped(rows)} from operation ${grouped(op)} on`).join(", ")}. `;
}

function decode(view, categories) {
  if (!view || view.byteLength < 64) return null;
  const copy = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const head = new Float64Array(copy, 0, 8 + 2 * categories), n = head[1];
  const body = new Float32Array(copy, head.byteLength);
  const row = (i) => body.subarray(i * n, (i + 1) * n);
  const parts = Array.from({ length: categories }, (_, i) => row(2 + i));
  const totals = Float64Array.from({ length: n }, (_, i) => parts.reduce((sum, part) => sum + part[i], 0));
  const marks = body.subarray(n * (2 + categories));
  return {
    n, finished: head[2] === 1, op: row(0), phase: row(1), parts, totals, ...decodeMarks(marks, n),
    peak: { total: head[3], op: head[4], phase: head[5], parts: head.subarray(8, 8 + categories) },
    current: { total: head[6], phase: head[7], parts: head.subarray(8 + categories) },
  };
}

// A category's fill: its colour, and marks that tell it apart without colour. The same signs as in style.py.
// What grows has no colour of its own ("none"): its marks stand on the page itself.
function hatched(color, sign, scale) {
  const size = 8, tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size * scale);
  const g = tile.getContext("2d");
  g.scale(tile.width / size, tile.height / size);
  let ink = INK;
  if (color !== "none") {
    g.fillStyle = color; g.fillRect(0, 0, size, size);
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

// Where each sample begins on the axis of operations, and where the last one ends. Samples of one operation share its
// width, and the last operation is at least a hundredth of the picture wide: so no peak is without width.
// The same rule as edges_of in timeline.py.
function edgesOf(op) {
  const n = op.length, edges = [], end = op[n - 1] + Math.max(1, (op[n - 1] - op[0]) / 100);
  for (let start = 0, next; start < n; start = next) {
    next = start + 1;
    while (next < n && op[next] === op[start]) next++;
    const width = (next < n ? op[next] : end) - op[start];
    for (let i = start; i < next; i++) edges.push(op[start] + (width * (i - start)) / (next - start));
  }
  return [...edges, end];
}

function make(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function render({ model, el }) {
  const { names, colors, hatches, phases, growing: growingLook } = model.get("appearance"); // growing: colour, hatch, name
  const budget = model.get("budget"), title = model.get("title");

  const root = make("figure", model.get("small") ? "gm-live gm-small" : "gm-live", el);
  const head = make("div", "gm-head", root);
  const heading = make("div", "gm-title", head);
  const dot = make("span", "gm-dot", heading);
  dot.title = "recording";
  heading.append(title || "Memory by category");
  heading.title = title; // a long one is cut
  const peakBox = make("div", "gm-figure", head), nowBox = make("div", "gm-figure", head);
  make("span", "", nowBox, "now ");
  const nowText = make("b", "", nowBox, "–"), nowPhase = make("span", "", nowBox);
  make("span", "", peakBox, "peak ");
  const peakText = make("b", "", peakBox, "–"), peakPhase = make("span", "", peakBox);

  const body = make("div", "gm-body", root), plot = make("div", "gm-plot", body);
  const canvas = make("canvas", "gm-canvas", plot);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "memory plot");
  canvas.dataset.lmSuppressShortcuts = "true"; // JupyterLab takes some arrow keys to move between cells

  const side = make("div", "gm-side", body), table = make("table", "", side);
  make("caption", "gm-hidden", table, "Bytes by category");
  const headRow = make("tr", "", make("thead", "", table));
  make("th", "", headRow, "category").scope = "col";
  const when = make("td", "", headRow, "now"), rows = make("tbody", "", table), cells = [];
  const addRow = (parent, color, hatch, name) => {
    const tr = make("tr", "", parent), th = make("th", "", tr);
    th.scope = "row";
    const swatch = make("canvas", "gm-swatch", th);
    swatch.width = 34; swatch.height = 28;
    const g = swatch.getContext("2d");
    g.fillStyle = g.createPattern(hatched(color, hatch, 2), "repeat");
    g.fillRect(0, 0, 34, 28);
    th.append(name);
    return make("td", "", tr, "–");
  };
  for (let c = names.length - 1; c >= 0; c--) cells[c] = addRow(rows, colors[c], hatches[c], names[c]); // top of the stack first
  const foot = make("tfoot", "", table), footRow = make("tr", "", foot);
  make("th", "", footRow, "total").scope = "row";
  const sum = make("td", "", footRow, "–");
  const growingCell = addRow(foot, ...growingLook), growingRow = growingCell.parentNode;
  growingRow.className = "gm-growing gm-none";
  const key = make("div", "gm-phases", side);
  const keyMarks = phases.map((phase) => {
    if (!phase) return null;
    const item = make("span", "", key), mark = make("i", "", item);
    item.append(phase);
    return mark;
  });

  const read = make("div", "gm-read", root);
  read.setAttribute("aria-live", "polite");
  let lost = false; // whether the kernel went away during the recording
  const hint = () => {
    read.textContent = lost ? "The recording stopped: the kernel has ended. " : "";
    for (const [keys, what] of [["← →", "move"], ["Home", ""], ["End", "ends"], ["P", "peak"], ["Esc", "let go"]]) {
      make("kbd", "", read, keys);
      read.append(what ? ` ${what}   ` : " ");
    }
  };
  hint();

  let frame = null, cursorOp = null, request = 0, fills = null, growingFill = null, fillScale = 0, geometry = null;
  let ink, paper, line, font, tones;

  function theme() {
    const style = getComputedStyle(root);
    ink = style.color;
    paper = style.getPropertyValue("--gm-paper").trim() || "#fff";
    line = style.getPropertyValue("--gm-line").trim() || "rgba(128,136,150,.35)";
    font = style.fontFamily;
    // Phases by index: idle, forward, backward, optimizer step; from faint to strong on either background.
    tones = isDark(ink) ? [null, "#dfe3ea", "#7b8495", "#262c38"] : [null, "#394152", "#8b95a8", "#eceff4"];
    keyMarks.forEach((mark, i) => { if (mark) mark.style.background = tones[i]; });
  }

  // The sample of an operation, or the last one before it. What an error frees is one more sample of the operation
  // that failed: of several, it is the one with the most bytes.
  function sampleAt(op) {
    let best = 0;
    for (let i = 1; i < frame.n && frame.op[i] <= op; i++) {
      if (frame.op[i] > frame.op[best] || frame.totals[i] > frame.totals[best]) best = i;
    }
    return best;
  }
  const cursorIndex = () => (cursorOp === null || !frame || !frame.n ? -1 : sampleAt(cursorOp));

  function words() {
    const at = cursorIndex(), { current, peak } = frame;
    nowText.textContent = formatBytes(current.total);
    nowPhase.textContent = phases[current.phase] ? ` ${phases[current.phase]}` : "";
    peakText.textContent = formatBytes(peak.total);
    peakText.classList.toggle("gm-over", budget > 0 && peak.total > budget);
    peakPhase.textContent = ` ${grouped(peak.total)} bytes` + (phases[peak.phase] ? `, ${phases[peak.phase]}` : "");
    dot.style.display = frame.finished || lost ? "none" : "";
    canvas.dataset.recording = !frame.finished && !lost;
    head.classList.toggle("gm-done", frame.finished);
    const source = at >= 0 ? frame.parts.map((part) => part[at]) : frame.finished ? peak.parts : current.parts;
    const total = at >= 0 ? frame.totals[at] : frame.finished ? peak.total : current.total;
    when.textContent = at >= 0 ? `operation ${grouped(frame.op[at])}` : frame.finished ? "at the peak" : "now";
    names.forEach((_, c) => { cells[c].textContent = formatBytes(source[c]); });
    sum.textContent = formatBytes(total);
    let shown = frame.n - 1; // the sample in the table: the cursor's, the peak's, or the last one
    if (at >= 0) shown = at;
    else if (frame.finished) shown = sampleAt(peak.op);
    const growing = growingAt(frame, shown);
    growingRow.classList.toggle("gm-none", frame.growing === null);
    growingCell.textContent = formatBytes(growing);
    canvas.setAttribute("aria-label",
      `Memory${title ? " of " + title : ""} by category. Peak ${formatBytes(peak.total)} (${grouped(peak.total)} bytes) at operation ` +
      `${grouped(peak.op)}${phases[peak.phase] ? ", " + phases[peak.phase] : ""}. ` +
      (frame.finished ? "" : `Current ${formatBytes(current.total)}. `) +
      (frame.growing ? `${formatBytes(growing)} of it grow from step to step. ` : "") + batchesInWords(frame.batches) +
      (budget ? `Budget ${formatBytes(budget)}. ` : "") + "Arrow keys read single operations, P jumps to the peak.");
  }

  function announce() {
    const at = cursorIndex();
    if (at < 0) return hint();
    const parts = names.map((name, c) => [frame.parts[c][at], name]).filter(([n]) => n > 0).sort((a, b) => b[0] - a[0]);
    read.textContent = `operation ${grouped(frame.op[at])}${phases[frame.phase[at]] ? ", " + phases[frame.phase[at]] : ""}: ` +
      `${formatBytes(frame.totals[at])}` +
      (parts.length ? ", of which " + parts.map(([n, name]) => `${name} ${formatBytes(n)}`).join(", ") : "") +
      (growingAt(frame, at) > 0 ? `; ${formatBytes(growingAt(frame, at))} of it grow from step to step` : "");
  }

  function draw() {
    request = 0;
    const width = plot.clientWidth, height = plot.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!width || !height) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    }
    theme();
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    if (fillScale !== ratio) {
      fillScale = ratio;
      const fill = (color, hatch) => {
        const pattern = g.createPattern(hatched(color, hatch, ratio), "repeat");
        pattern.setTransform(new DOMMatrix().scale(1 / ratio));
        return pattern;
      };
      fills = colors.map((color, c) => fill(color, hatches[c]));
      growingFill = fill(growingLook[0], growingLook[1]);
    }
    const x0 = PAD.left, x1 = width - PAD.right, y0 = height - PAD.bottom, y1 = PAD.top;
    g.font = `11px ${font}`; g.textBaseline = "middle"; g.lineJoin = "round";
    canvas.dataset.points = frame ? frame.n : 0;
    if (!frame || !frame.n) {
      g.fillStyle = ink; g.globalAlpha = 0.6; g.textAlign = "center"; g.font = `13px ${font}`;
      g.fillText("waiting for the first operation", (x0 + x1) / 2, (y0 + y1) / 2);
      g.globalAlpha = 1;
      return;
    }
    words();
    const { n, op, phase, parts, totals, peak, growing, batches } = frame;
    const highest = Math.max(peak.total, model.get("top"), totals.reduce((a, b) => Math.max(a, b), 1));
    const shown = Math.max(highest, budget && budget <= 2.5 * highest ? budget : 0) * 1.08;
    const [unit, factor] = UNITS.find(([, f]) => highest >= f) || ["B", 1];
    const yStep = niceStep(shown / factor, 4) * factor;
    const top = Math.ceil(shown / (yStep / 2)) * (yStep / 2); // in half steps, so that the axis does not tremble
    const edges = edgesOf(op), first = edges[0], last = edges[n];
    const px = (o) => x0 + ((o - first) / (last - first)) * (x1 - x0);
    const py = (bytes) => y0 - (bytes / top) * (y0 - y1);
    geometry = { x0, x1, first, last };
    const halo = (text, x, y) => { g.lineWidth = 3.5; g.strokeStyle = paper; g.strokeText(text, x, y); g.fillText(text, x, y); };

    g.textAlign = "right";
    for (let v = 0; v <= top + 1; v += yStep) {
      const y = Math.round(py(v)) + 0.5;
      g.strokeStyle = line; g.lineWidth = 1; g.globalAlpha = 0.55;
      g.beginPath(); g.moveTo(x0, y); g.lineTo(x1, y); g.stroke();
      g.globalAlpha = 0.75; g.fillStyle = ink;
      g.fillText(String(+(v / factor).toPrecision(6)), x0 - 8, y);
    }
    g.fillText(unit, x0 - 8, y1 - 13);
    g.textAlign = "center";
    const xStep = Math.max(1, niceStep(last - first, Math.max(2, (x1 - x0) / 95)));
    for (let o = Math.ceil(first / xStep) * xStep; o <= last; o += xStep) {
      if (px(o) < x1 - 8) g.fillText(grouped(o), px(o), y0 + 13);
    }
    g.fillText("operations", (x0 + x1) / 2, y0 + 29);
    g.globalAlpha = 1;

    // Steps, not slopes: a value holds until the next sample.
    const edge = (values) => {
      g.moveTo(px(edges[0]), py(values[0]));
      for (let i = 0; i < n; i++) { g.lineTo(px(edges[i]), py(values[i])); g.lineTo(px(edges[i + 1]), py(values[i])); }
    };
    const dense = n > (x1 - x0) / 4; // spikes this close would be covered by their own outline
    // From the foot of the stack: what grows, then the other bytes by category.
    const others = (part, c) => (growing ? part.map((v, i) => v - growing[c][i]) : part);
    const areas = parts.map((part, c) => ({ part: others(part, c), fill: fills[c], color: colors[c] }));
    if (growing) areas.unshift({ part: totals.map((_, i) => growingAt(frame, i)), fill: growingFill, color: growingLook[0] });
    let low = new Float64Array(n);
    for (const { part, fill } of areas) {
      if (!part.some((v) => v > 0)) continue;
      const high = low.map((v, i) => v + part[i]);
      g.beginPath(); edge(high);
      for (let i = n - 1; i >= 0; i--) { g.lineTo(px(edges[i + 1]), py(low[i])); g.lineTo(px(edges[i]), py(low[i])); }
      g.fillStyle = fill; g.fill();
      g.beginPath(); edge(high); g.strokeStyle = paper; g.globalAlpha = dense ? 0.25 : 0.8; g.lineWidth = 0.8; g.stroke(); g.globalAlpha = 1;
      low = high;
    }
    g.globalAlpha = dense ? 0.3 : 1;
    g.beginPath(); edge(low); g.strokeStyle = ink; g.lineWidth = dense ? 0.6 : 1.2; g.stroke();
    g.globalAlpha = 1;
    g.beginPath(); g.moveTo(x0, y0 + 0.5); g.lineTo(x1, y0 + 0.5); g.lineWidth = 1; g.stroke();

    // The strip of phases.
    const runs = [];
    for (let i = 0; i < n; i++) {
      if (!runs.length || runs[runs.length - 1].phase !== phase[i]) runs.push({ phase: phase[i], from: edges[i] });
      runs[runs.length - 1].to = edges[i + 1];
    }
    const steps = stepsOf(runs);
    key.classList.toggle("gm-steps", steps !== null);
    for (const run of steps ?? runs) {
      if (!steps && !tones[run.phase]) continue;
      const a = px(run.from), b = px(run.to), tone = steps ? tones[1 + run.number % 2] : tones[run.phase];
      g.fillStyle = tone;
      g.fillRect(a, y1 - STRIP, Math.max(b - a - (b - a > 6 ? 1 : 0), 0.5), 15);
      g.font = `10.5px ${font}`;
      const names = steps ? [`step ${run.number}`, `${run.number}`] : [phases[run.phase], SHORT[run.phase]];
      const label = names.find((name) => g.measureText(name).width + 4 < b - a);
      if (label) {
        g.fillStyle = isDark(tone) || tone === "#7b8495" ? "#fff" : "#14181f";
        g.fillText(label, (a + b) / 2, y1 - 13);
      }
      if ((steps ?? runs).length <= 40) {
        g.strokeStyle = ink; g.globalAlpha = 0.16; g.lineWidth = 1;
        g.beginPath(); g.moveTo(a, y1 - 6); g.lineTo(a, y0); g.stroke(); g.globalAlpha = 1;
      }
    }

    // Where the batch's size changes: a line, and above the strip the size from there on.
    g.font = `10.5px ${font}`; g.textAlign = "left"; g.strokeStyle = g.fillStyle = ink; g.lineWidth = 1.1;
    let free = x0; // where the next label may begin
    for (const [i, { op: from, rows }] of (batches.length > MOST_BATCHES ? [] : batches).entries()) {
      const x = px(from), label = `batch ${grouped(rows)}`, wide = g.measureText(label).width;
      if (i) {
        g.setLineDash([3, 3]); g.globalAlpha = 0.75;
        g.beginPath(); g.moveTo(x, y1 - 6); g.lineTo(x, y0); g.stroke();
        g.setLineDash([]); g.globalAlpha = 1;
      }
      const start = Math.max(Math.min(x, x1 - wide), x0);
      if (start < free) continue;
      free = start + wide + 6;
      g.fillText(label, start, y1 - STRIP - 8);
    }

    g.font = `600 12px ${font}`;
    const peakSample = sampleAt(peak.op), pX = px(edges[peakSample]), pY = py(peak.total), right = pX < x0 + 0.7 * (x1 - x0);
    if (budget) {
      const y = budget <= top ? py(budget) : y1, text = `budget ${formatBytes(budget)}`;
      const bX = x0 + 6; // always here, so that it does not hop when the peak moves
      g.strokeStyle = g.fillStyle = ALARM; g.textAlign = "left";
      if (budget <= top) {
        g.setLineDash([6, 4]); g.lineWidth = 1.6;
        g.beginPath(); g.moveTo(x0, y); g.lineTo(x1, y); g.stroke(); g.setLineDash([]);
        halo(text, bX, y > y1 + 14 ? y - 10 : y + 11);
      } else halo(`${text} (above this picture)`, bX, y + 9);
    }
    g.fillStyle = ink; g.strokeStyle = paper; g.lineWidth = 2;
    g.beginPath(); g.arc(pX, pY, 4.5, 0, 7); g.stroke(); g.fill();
    g.textAlign = right ? "left" : "right";
    // Below the budget's label, where the two would meet.
    const meets = budget && Math.abs(pY - (budget <= top ? py(budget) : y1)) < 24 && pX < x0 + 190;
    halo(`peak ${formatBytes(peak.total)}`, pX + (right ? 9 : -9), meets ? pY + 20 : Math.max(pY - 6, y1 + 4));

    const at = cursorIndex();
    if (at >= 0) {
      const x = px(edges[at]);
      g.strokeStyle = ink; g.lineWidth = 1.2;
      g.beginPath(); g.moveTo(x, y1 - 6); g.lineTo(x, y0); g.stroke();
      let sumHere = 0;
      areas.forEach(({ part, color }) => {
        if (!(part[at] > 0)) return;
        sumHere += part[at];
        g.beginPath(); g.arc(x, py(sumHere), 3.4, 0, 7);
        g.fillStyle = color; g.strokeStyle = paper; g.lineWidth = 3; g.stroke(); g.fill();
        g.strokeStyle = ink; g.lineWidth = 1; g.stroke();
      });
    }
    canvas.dataset.ink = ink;
  }

  const schedule = () => { if (!request) request = requestAnimationFrame(draw); };
  const arrived = () => {
    frame = decode(model.get("frame"), names.length);
    canvas.dataset.frames = +(canvas.dataset.frames || 0) + 1;
    schedule();
  };
  const stopped = () => {
    if (lost || frame?.finished) return;
    lost = true;
    dot.style.display = "none";
    canvas.dataset.recording = false;
    root.classList.add("gm-lost");
    hint();
    schedule();
  };
  const moveTo = (op) => { cursorOp = op; announce(); schedule(); };

  canvas.addEventListener("keydown", (event) => {
    if (!frame || !frame.n || event.ctrlKey || event.metaKey || event.altKey) return;
    const n = frame.n, at = cursorIndex(), leap = event.shiftKey ? Math.max(1, Math.round(n / 20)) : 1;
    const right = () => {
      let i = Math.min(at + leap, n - 1);
      while (i < n - 1 && frame.op[i] === frame.op[at]) i++; // another sample of this operation
      return frame.op[i];
    };
    const left = () => {
      if (at < 0) return frame.op[n - 1];
      let i = Math.max(at - leap, 0);
      while (i > 0 && frame.op[i] === frame.op[at]) i--;
      return frame.op[i];
    };
    const targets = {
      ArrowRight: right,
      ArrowLeft: left,
      Home: () => frame.op[0], End: () => frame.op[n - 1],
      p: () => frame.peak.op, P: () => frame.peak.op, Escape: () => null,
    };
    if (!(event.key in targets)) return;
    event.preventDefault(); event.stopPropagation();
    moveTo(targets[event.key]());
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!geometry || !frame || !frame.n) return;
    const { x0, x1, first, last } = geometry, x = event.clientX - canvas.getBoundingClientRect().left;
    moveTo(x < x0 - 4 || x > x1 + 4 ? null : first + ((x - x0) / (x1 - x0)) * (last - first));
  });
  canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) moveTo(null); });
  canvas.addEventListener("blur", () => moveTo(null));

  const resized = new ResizeObserver(schedule);
  resized.observe(plot);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", schedule);
  // A new theme arrives as a transition of the colour, as an attribute of the page, or as a style sheet.
  root.addEventListener("transitionend", schedule);
  const restyled = new MutationObserver(schedule);
  restyled.observe(document.body, { attributes: true });
  document.head.addEventListener("load", schedule, true);
  model.on("change:frame", arrived);
  model.on("change:top", schedule);
  const kernel = model.widget_manager?.kernel;
  const kernelState = (_, status) => { if (GONE.includes(status)) stopped(); };
  kernel?.statusChanged?.connect(kernelState);
  kernel?.disposed?.connect(stopped);
  arrived();
  return () => {
    model.off("change:frame", arrived);
    model.off("change:top", schedule);
    kernel?.statusChanged?.disconnect(kernelState);
    kernel?.disposed?.disconnect(stopped);
    resized.disconnect();
    restyled.disconnect();
    document.head.removeEventListener("load", schedule, true);
    dark.removeEventListener("change", schedule);
    cancelAnimationFrame(request);
  };
}

export default { render };
