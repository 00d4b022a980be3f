// "What fits my card": the reader's choice lives in the address (#model=...&card=...&method=...), so that it can be sent.
const place = document.getElementById("fits");
const METHOD = { full: "every weight", lora: "LoRA", qlora: "LoRA on a base in 4 bits" };
const asked = ["model", "card", "method"];
const values = { model: FITS.models, card: FITS.cards.map((card) => card.name), method: FITS.methods };
const entries = new Map(FITS.entries.map((entry) => [asked.map((name) => entry[name]).join("|"), entry]));

const text = (words) => String(words).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(n) >= size) return `${(n / size).toFixed(n / size >= 100 ? 0 : 1)} ${unit}`;
  return `${n} B`;
}
const micro = (entry) => `${Number(entry.us_per_token.toPrecision(3)).toLocaleString("en")} µs`;

function chosen() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const known = (name) => (values[name].includes(hash.get(name)) ? hash.get(name) : null);
  const usual = { model: "Llama-2-7B", card: "RTX 3090 24GB", method: "lora" };
  const first = (name) => (values[name].includes(usual[name]) ? usual[name] : values[name][0]);
  return Object.fromEntries(asked.map((name) => [name, known(name) ?? first(name)]));
}
const address = (choice) => "#" + new URLSearchParams(choice);

function picker(name, label, choice) {
  const options = values[name].map((value) =>
    `<option value="${text(value)}"${value === choice[name] ? " selected" : ""}>${text(METHOD[value] ?? value)}</option>`);
  return `<label>${label}<select name="${name}">${options.join("")}</select></label>`;
}

// The peak's bytes side by side, with a line where the card ends.
function bar(entry, card) {
  const parts = Object.entries(entry.parts ?? { needs: entry.needs }).filter(([, n]) => n > 0);
  const top = Math.max(entry.needs, card.nbytes) * 1.01;
  const greys = ["#9aa4b2", "#6b7686", "#434c5a"]; // what a card holds beside the live bytes
  const beside = parts.map(([name]) => name).filter((name) => !PATTERNS[name]);
  const fill = (name) => (PATTERNS[name] ? `url(#fits-${name})` : greys[beside.indexOf(name) % 3]);
  let x = 0;
  const boxes = parts.map(([name, n]) => {
    const box = `<rect x="${(1000 * x) / top}" y="6" width="${(1000 * n) / top}" height="48" fill="${fill(name)}"/>`;
    x += n;
    return box;
  });
  const end = (1000 * card.nbytes) / top;
  const legend = parts.map(([name, n]) => `<li><svg width="16" height="16" aria-hidden="true"><rect width="16" height="16"
    fill="${fill(name)}"/></svg> ${text(name)} <b>${bytes(n)}</b></li>`);
  const rest = entry.spare >= 0 ? `<li><i class="free"></i> free <b>${bytes(entry.spare)}</b></li>` : "";
  const words = `${bytes(entry.needs)} needed, of ${bytes(card.nbytes)}`;
  return `<svg class="bar" viewBox="0 0 1000 60" preserveAspectRatio="none" role="img" aria-label="${words}">
    <defs>${Object.values(PATTERNS).join("")}</defs><rect class="room" y="6" width="${end}" height="48"/>${boxes.join("")}
    <line class="end" x1="${end}" x2="${end}" y1="0" y2="60"/></svg>
    <p class="scale">${words}. The red line is the end of the card.</p><ul class="legend">${legend.join("")}${rest}</ul>`;
}

function answer(entry, card) {
  const verdict = entry.fits
    ? `<b class="yes">It fits</b>, with ${bytes(entry.spare)} to spare. A token takes about ${micro(entry)}, by estimate.`
    : `<b class="no">It does not fit</b>. The closest recipe lacks ${bytes(-entry.spare)}.`;
  const why = entry.fits ? "" : `<p>${text(entry.why_not)}</p>`;
  const faster = entry.next_faster ? `<p>The next faster recipe does not fit: ${text(entry.next_faster)}</p>` : "";
  const code = entry.code
    ? `<h3>The code</h3><div class="highlight"><pre tabindex="0">${text(entry.code)}</pre></div>` : "";
  return `<p role="status">${verdict} A step is ${entry.global_batch} rows
    of ${entry.seq_len.toLocaleString("en")} tokens.</p><p><b>Recipe</b>: ${text(entry.recipe)}</p>${bar(entry, card)}${why}${faster}${code}`;
}

// All cards and methods for one model; each cell leads to its answer.
function overview(choice) {
  const cell = (card, method) => {
    const entry = entries.get([choice.model, card, method].join("|"));
    if (!entry) return "<td>–</td>";
    const here = card === choice.card && method === choice.method ? ' aria-current="true"' : "";
    const words = entry.fits ? `✓ ${micro(entry)}` : `✗ lacks ${bytes(-entry.spare)}`;
    return `<td class="${entry.fits ? "yes" : "no"}"><a href="${text(address({ ...choice, card, method }))}"${here}>${words}</a></td>`;
  };
  const rows = values.card.map((card) =>
    `<tr><th scope="row">${text(card)}</th>${values.method.map((method) => cell(card, method)).join("")}</tr>`);
  const heads = values.method.map((method) => `<th scope="col">${text(METHOD[method] ?? method)}</th>`);
  return `<h2>${text(choice.model)} on every card</h2><p>✓: it fits, and the estimated time of a token. ✗: it does not.</p>
    <div class="wide"><table class="table"><thead><tr><th scope="col">card</th>${heads.join("")}</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
}

function show() {
  const choice = chosen();
  const focus = document.activeElement?.name;
  const entry = entries.get(asked.map((name) => choice[name]).join("|"));
  const card = FITS.cards.find((card) => card.name === choice.card);
  place.innerHTML = `<form class="pick">${picker("model", "Model", choice)}${picker("card", "Card", choice)}
    ${picker("method", "Trained", choice)}</form>
    <h2>${text(choice.model)} on ${text(choice.card)}, ${text(METHOD[choice.method] ?? choice.method)}</h2>
    ${entry ? answer(entry, card) : "<p>This combination was not computed.</p>"}${overview(choice)}
    <p class="scale">Computed on ${FITS.date} with torch ${FITS.versions.torch} and transformers ${FITS.versions.transformers}.</p>`;
  place.querySelector(`[name="${focus}"]`)?.focus();
  place.hidden = false;
  addCopyButtons(place);
}

place.addEventListener("change", ({ target }) => {
  location.hash = address({ ...chosen(), [target.name]: target.value });
});
addEventListener("hashchange", show);
show();
