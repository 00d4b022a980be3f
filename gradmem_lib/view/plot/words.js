// Figures in words, as the Python half writes them (units.py and style.py).

export const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
export const ALARM = "#e0483f";
export const INK = "#6f7787"; // as in style.py: it reads on a light and on a dark page

// Ties go to the even digit, as in Python, so that the moving and the still picture say the same.
function twoDigits(x) {
  const hundredths = Math.round(x * 100), tie = (x * 100) % 1 === 0.5;
  return ((tie && hundredths % 2 ? hundredths - 1 : hundredths) / 100).toFixed(2);
}

export function formatBytes(n) {
  for (const [unit, factor] of UNITS) if (n >= factor) return `${twoDigits(n / factor)} ${unit}`;
  return `${Math.round(n)} B`;
}

export const grouped = (n) => Math.round(n).toLocaleString("en-US");

// A round distance (1, 2 or 5 times a power of ten) that cuts the span into about so many parts.
export function niceStep(span, parts) {
  const wanted = Math.max(span, 1e-9) / parts, power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= wanted * 0.8);
}

const probe = document.createElement("canvas").getContext("2d");

export function isDark(color) {
  probe.fillStyle = "#000";
  probe.fillStyle = color;
  const text = probe.fillStyle;
  const [r, g, b] = text[0] === "#" ? [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)) : text.match(/[\d.]+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b < 110;
}

export function make(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
