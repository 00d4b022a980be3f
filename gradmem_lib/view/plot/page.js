// Draws the finished pictures of a page that are not drawn so far (see explorable_html in live.py). Of a notebook's
// outputs one brings the script, and the others call it.

import { render } from "./plot.js";
import { unpacked } from "./run.js";

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

const stops = new Map(); // what ends the picture of an element

async function drawOne(host) {
  host.dataset.gradmemDrawn = "";
  const frame = new DataView(await unpacked(bytesOf(host.dataset.gradmemFrame)));
  const settings = { ...JSON.parse(host.dataset.gradmemSettings), frame, blocks: bytesOf(host.dataset.gradmemBlocks) };
  const stop = render({ model: { get: (name) => settings[name], on() {}, off() {} }, el: host });
  stops.set(host, stop);
  for (const still of host.closest(".gm-explorable").querySelectorAll(".gm-still")) still.hidden = true;
}

// An output that was replaced keeps nothing alive.
function dropLost() {
  for (const [host, stop] of stops) {
    if (host.isConnected) continue;
    stop();
    host.replaceChildren();
    delete host.dataset.gradmemDrawn;
    stops.delete(host);
  }
}

window.gradmemDraw = () => {
  dropLost();
  for (const host of document.querySelectorAll("[data-gradmem-frame]:not([data-gradmem-drawn])")) drawOne(host);
};
window.gradmemDraw();
