// The explorer's answer: one bar, and the verdict in words, in a live region that stays while the bar is redrawn.
function render({ model, el }) {
  const root = document.createElement("div"), bar = document.createElement("div");
  const verdict = document.createElement("p"), detail = document.createElement("p");
  root.className = "gm-explorer"; verdict.className = "gm-verdict"; detail.className = "gm-detail";
  verdict.setAttribute("role", "status");
  verdict.setAttribute("aria-live", "polite");
  root.append(verdict, bar, detail);
  el.append(root);
  // The sliders come without a name, and with the index of their value: give screen readers what the eye sees.
  const nameSliders = () => {
    for (const slider of el.closest(".widget-vbox")?.querySelectorAll(".widget-slider") ?? []) {
      const handle = slider.querySelector("[role=slider]"), readout = slider.querySelector(".widget-readout");
      handle?.setAttribute("aria-label", slider.querySelector(".widget-label")?.textContent ?? "");
      if (readout) handle?.setAttribute("aria-valuetext", readout.textContent);
    }
  };
  const update = () => {
    if (bar.dataset.svg !== model.get("svg")) bar.innerHTML = bar.dataset.svg = model.get("svg");
    verdict.textContent = model.get("verdict");
    verdict.classList.toggle("gm-exceeds", !model.get("fits"));
    detail.textContent = model.get("detail");
    requestAnimationFrame(nameSliders);
  };
  model.on("change", update);
  update();
  return () => model.off("change", update);
}

export default { render };
