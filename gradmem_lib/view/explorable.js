// The end of a finished picture's script (see explorable_html in live.py): draws each picture in its element.
// Elements are marked when they are drawn, since every picture on a page brings this script.

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

for (const host of document.querySelectorAll("[data-gradmem-frame]:not([data-gradmem-drawn])")) {
  host.dataset.gradmemDrawn = "";
  const bytes = bytesOf(host.dataset.gradmemFrame);
  const settings = { ...JSON.parse(host.dataset.gradmemSettings), frame: new DataView(bytes.buffer) };
  const model = { get: (name) => settings[name], on() {}, off() {} };
  render({ model, el: host });
  for (const still of host.closest(".gm-explorable").querySelectorAll(".gm-still")) still.hidden = true;
}
