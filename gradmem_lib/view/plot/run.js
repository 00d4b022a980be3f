// What is drawn: a run, decoded from a frame (encode_frame in live.py) or from its blocks (encode_blocks in blocks.py).
// A run has n samples: operation, phase, bytes by category, and their sum. Blocks are storages, each with its life.

// What follows the rows of a frame: the bytes that grow, by category (null if none do), and the sizes of the batch.
function decodeMarks(marks, n) {
  const count = marks.length ? marks[0] : 0, pairs = marks.subarray(1 + count * n), batches = [];
  const row = (i) => marks.subarray(1 + i * n, 1 + (i + 1) * n);
  const growing = count ? Array.from({ length: count }, (_, i) => row(i)) : null;
  for (let i = 0; i + 1 < pairs.length; i += 2) batches.push({ op: pairs[i], rows: pairs[i + 1] });
  return { growing, batches };
}

const sums = (rows, n) => Float64Array.from({ length: n }, (_, i) => rows.reduce((sum, row) => sum + row[i], 0));

export function decodeFrame(view, categories) {
  if (!view || view.byteLength < 64) return null;
  const copy = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const head = new Float64Array(copy, 0, 8 + 2 * categories), n = head[1];
  const body = new Float32Array(copy, head.byteLength);
  const row = (i) => body.subarray(i * n, (i + 1) * n);
  const parts = Array.from({ length: categories }, (_, i) => row(2 + i));
  const marks = body.subarray(n * (2 + categories));
  return {
    n, finished: head[2] === 1, op: row(0), phase: row(1), parts, totals: sums(parts, n), blocks: [], ...decodeMarks(marks, n),
    peak: { total: head[3], op: head[4], phase: head[5], parts: head.subarray(8, 8 + categories) },
    current: { total: head[6], phase: head[7], parts: head.subarray(8 + categories) },
  };
}

export async function unpacked(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function runningSum(deltas) {
  let sum = 0;
  return deltas.map((delta) => (sum += delta));
}

// A step function over n samples, from where it changes and by how much.
function series([at, by], n) {
  const values = new Float64Array(n), places = runningSum(at);
  for (let k = 0, value = 0; k < places.length; k++) values.fill((value += by[k]), places[k], places[k + 1] ?? n);
  return values;
}

// The run of a frame, with all of its samples in place of a few, and with its blocks.
export async function withBlocks(run, packed) {
  const given = JSON.parse(new TextDecoder().decode(await unpacked(packed))), { n, strings } = given;
  const parts = given.parts.map((changes) => series(changes, n));
  const growing = given.growing && given.growing.map((changes) => series(changes, n));
  const starts = runningSum(given.start);
  const blocks = starts.map((start, b) => ({
    number: b, start, stop: start + given.life[b], bytes: given.bytes[b], category: given.category[b], grows: given.grows[b] === 1,
    ends: start + given.life[b] < n, // freed while the run went on
    ...Object.fromEntries(Object.entries(given.words).map(([name, column]) => [name, strings[column[b]]])),
  }));
  return { ...run, n, op: runningSum(given.op), phase: series(given.phase, n), parts, totals: sums(parts, n), growing, blocks };
}

// How many bytes grow at sample number i.
export const growingAt = (run, i) => (run.growing ? run.growing.reduce((sum, row) => sum + row[i], 0) : 0);

// The sample of an operation, or the last one before it. What an error frees is one more sample of the operation that
// failed: of several, it is the one with the most bytes.
export function sampleOf(run, op) {
  let best = 0;
  for (let i = 1; i < run.n && run.op[i] <= op; i++) {
    if (run.op[i] > run.op[best] || run.totals[i] > run.totals[best]) best = i;
  }
  return best;
}

// Where each sample begins on the axis of operations, and where the last one ends. Samples of one operation share its
// width, and the last operation is at least a hundredth of the picture wide: so no peak is without width.
// The same rule as edges_of in timeline.py.
export function edgesOf(op) {
  const n = op.length, edges = [], end = op[n - 1] + Math.max(1, (op[n - 1] - op[0]) / 100);
  for (let start = 0, next; start < n; start = next) {
    next = start + 1;
    while (next < n && op[next] === op[start]) next++;
    const width = (next < n ? op[next] : end) - op[start];
    for (let i = start; i < next; i++) edges.push(op[start] + (width * (i - start)) / (next - start));
  }
  return [...edges, end];
}

// Neighbouring samples of one phase.
export function runsOf(phase, edges) {
  const runs = [];
  for (let i = 0; i < phase.length; i++) {
    if (!runs.length || runs[runs.length - 1].phase !== phase[i]) runs.push({ phase: phase[i], from: edges[i] });
    runs[runs.length - 1].to = edges[i + 1];
  }
  return runs;
}

// Where phases are too many to tell apart: the steps, each up to the end of an optimizer step, numbered from 1.
export function stepsOf(runs) {
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
