// The one geometry of the picture: which groups lie upon another, and where each block is at each sample.
// A group is a category, or all blocks of one kind of module, line or holder. From its foot, it has its blocks in the
// order in which they came, so that a new one never lifts an old one, and above them all bytes that are no block.

import { growingAt } from "./run.js";

export const GROUPINGS = ["category", "module", "line", "holder"];
const MOST_GROUPS = 5; // beside the rest: as many as there are colours
const REST = "the rest";

const OF_WEIGHTS = 3; // categories whose blocks have the name of a weight: parameters, gradients, optimizer

const keyOf = {
  // a module with its weights, and the same part of each layer, are one kind
  module: ({ module, category }) => {
    const owner = category < OF_WEIGHTS ? module.replace(/\.\w+$/, "") : module;
    return owner.replaceAll(/(^|\.)\d+(?=\.|$)/g, "$1*");
  },
  line: (block) => block.line,
  holder: (block) => block.held,
};

// The bytes of blocks at each sample.
function totalOf(blocks, n) {
  const change = new Float64Array(n + 1);
  for (const { start, stop, bytes } of blocks) {
    change[start] += bytes;
    change[stop] -= bytes;
  }
  let sum = 0;
  return change.subarray(0, n).map((by) => (sum += by));
}

function categories(run, { names, looks, growing }) {
  const growingRows = run.growing;
  const groups = names.map((name, c) => {
    const total = growingRows ? run.parts[c].map((v, i) => v - growingRows[c][i]) : run.parts[c] ?? [];
    return { name, look: looks[c], blocks: run.blocks.filter((block) => block.category === c && !(growingRows && block.grows)), total };
  });
  if (!growingRows) return groups;
  const total = run.totals.map((_, i) => growingAt(run, i));
  return [{ ...growing, blocks: run.blocks.filter((block) => block.grows), total }, ...groups];
}

// The groups of a run from the foot of the stack to its top.
export function arrange(run, by, appearance) {
  if (by === "category") return categories(run, appearance);
  const kinds = new Map(), peak = run.totals.indexOf(Math.max(...run.totals));
  for (const block of run.blocks) {
    const name = keyOf[by](block);
    if (!kinds.has(name)) kinds.set(name, { name, blocks: [], nbytes: 0 });
    const kind = kinds.get(name);
    kind.blocks.push(block);
    if (block.start <= peak && peak < block.stop) kind.nbytes += block.bytes;
  }
  kinds.delete("");
  const largest = [...kinds.values()].toSorted((a, b) => b.nbytes - a.nbytes).slice(0, MOST_GROUPS);
  const groups = largest.map(({ name, blocks }, k) => ({ name, look: appearance.looks[k], blocks, total: totalOf(blocks, run.n) }));
  const shown = new Set(largest.flatMap(({ blocks }) => blocks));
  const rest = run.totals.map((total, i) => groups.reduce((left, group) => left - group.total[i], total));
  const others = run.blocks.filter((block) => !shown.has(block));
  return [...groups, { name: REST, look: appearance.looks[MOST_GROUPS], blocks: others, total: rest }];
}

// One group by itself. A category has its growing bytes, too, which lie at the foot of the whole stack.
export function arrangeOne(run, name, by, appearance) {
  const given = by === "category" ? { ...run, growing: null } : run;
  return arrange(given, by, appearance).filter((group) => group.name === name);
}

// The layers of one sample, from the bottom up: {group, block (null: bytes without one), low (bytes below it), bytes}.
export function stackAt(groups, sample) {
  const stack = [];
  let low = 0;
  for (const group of groups) {
    const top = low + group.total[sample];
    for (const block of group.blocks) {
      if (block.start > sample) break;
      if (block.stop <= sample) continue;
      stack.push({ group, block, low, bytes: block.bytes });
      low += block.bytes;
    }
    if (top - low > 0.5) stack.push({ group, block: null, low, bytes: top - low });
    low = top;
  }
  return stack;
}

// The first place in the ascending `samples` that is not before `sample`.
function placeIn(samples, sample) {
  let low = 0, high = samples.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (samples[middle] < sample) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Visits the blocks from the foot of the stack on: visit(block, first, end, feet), where the samples from place `first` up
// to `end` have the block, and `feet` has the bytes below it at each place. It ends when a visit returns true.
export function climb(groups, samples, visit) {
  const base = new Float64Array(samples.length);
  for (const { blocks, total } of groups) {
    const feet = base.slice();
    for (const block of blocks) {
      const first = placeIn(samples, block.start), end = placeIn(samples, block.stop);
      if (first === end) continue;
      if (visit(block, first, end, feet)) return;
      for (let k = first; k < end; k++) feet[k] += block.bytes;
    }
    samples.forEach((sample, k) => { base[k] += total[sample]; });
  }
}

// A block over its whole life: {first, feet}, as in `climb`; null where none of the samples has it.
export function lifeOf(groups, block, samples) {
  let life = null;
  climb(groups, samples, (one, first, end, feet) => {
    if (one === block) life = { first, feet: feet.slice(first, end) };
    return one === block;
  });
  return life;
}
