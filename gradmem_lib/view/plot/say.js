// A run in words: what is written above and below its picture, and what a screen reader hears.

import { MOST_BATCHES } from "./draw.js";
import { growingAt } from "./run.js";
import { formatBytes, grouped } from "./words.js";

function batchesInWords(batches) {
  if (!batches.length) return "";
  if (batches.length > MOST_BATCHES) {
    const sizes = batches.map(({ rows }) => rows);
    return `The batch has ${grouped(Math.min(...sizes))} to ${grouped(Math.max(...sizes))} rows. `;
  }
  return `Rows of the batch: ${batches.map(({ op, rows }) => `${grouped(rows)} from operation ${grouped(op)} on`).join(", ")}. `;
}

const prefixed = (prefix, words) => (words ? prefix + words : "");

// A moment: its operation, its phase, and its bytes by category.
export function momentInWords(run, sample, { names, phases }) {
  const parts = names.map((name, c) => [run.parts[c][sample], name]).filter(([n]) => n > 0).toSorted((a, b) => b[0] - a[0]);
  const listed = parts.map(([n, name]) => `${name} ${formatBytes(n)}`).join(", "), growing = growingAt(run, sample);
  return `operation ${grouped(run.op[sample])}${prefixed(", ", phases[run.phase[sample]])}: ${formatBytes(run.totals[sample])}` +
    prefixed(", of which ", listed) + (growing > 0 ? `; ${formatBytes(growing)} of it grow from step to step` : "");
}

// What lies at a place of the stack (see stackAt): a block with its life, or what has no block of its own.
export function blockInWords(run, { block, bytes, group }, { names, phases }) {
  if (!block) return `${formatBytes(bytes)} of ${group.name}, in small or short-lived storages that have no block of their own.`;
  const during = (i) => `operation ${grouped(run.op[i])}${phases[run.phase[i]] ? ` (${phases[run.phase[i]]})` : ""}`;
  const from = block.start ? during(block.start) : "the start", to = block.ends ? during(block.stop) : "the end";
  const what = [block.tensor, `${formatBytes(block.bytes)} (${grouped(block.bytes)} bytes)`, names[block.category]].filter(Boolean).join(", ");
  return what + prefixed(" of ", block.module) + prefixed(" by ", block.op) + prefixed(" at ", block.line) + `; alive from ${from} to ${to}` +
    prefixed("; held by ", block.held) + ".";
}

// The whole picture, for those who do not see it. `sample`: that of the peak.
export function pictureInWords(run, sample, { title, by, budget }, { phases }) {
  const { current, peak } = run;
  return `Memory${prefixed(" of ", title)} by ${by}. Peak ${formatBytes(peak.total)} (${grouped(peak.total)} bytes) at operation ` +
    `${grouped(peak.op)}${prefixed(", ", phases[peak.phase])}. ` +
    (run.finished ? "" : `Current ${formatBytes(current.total)}. `) +
    (run.growing ? `${formatBytes(growingAt(run, sample))} of it grow from step to step. ` : "") + batchesInWords(run.batches) +
    (budget ? `Budget ${formatBytes(budget)}. ` : "") + "Arrow keys read single operations, P jumps to the peak." +
    (run.blocks.length ? " Up and down read the blocks of a moment, Enter pins one, plus and minus zoom." : "");
}
