// Draws the finished pictures of a page that are not drawn so far (see explorable_html in live.py). Of a notebook's
// outputs one brings the script, and the others call it.

import { render } from "./plot.js";
import { unpacked } from "./run.js";

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

async function drawOne(host) {
  host.dataset.gradmemDrawn = "";
  const frame = new DataView(await unpacked(bytesOf(host.dataset.gradmemFrame)));
  const settings = { ...JSON.parse(host.dataset.gradmemSettings), frame, blocks: bytesOf(host.dataset.gradmemBlocks) };
  render({ model: { get: (name) => settings[name], on() {}, off() {} }, el: host });
  for (const still of host.closest(".gm-explorable").querySelectorAll(".gm-still")) still.hidden = true;
}

window.gradmemDraw = () => {
  for (const host of document.querySelectorAll("[data-gradmem-frame]:not([data-gradmem-drawn])")) drawOne(host);
};
window.gradmemDraw();
