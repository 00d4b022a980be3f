// The schedule explorer's picture, and its peak in words, in a live region that stays while the picture is redrawn.
function render({ model, el }) {
  const root = document.createElement("div"), picture = document.createElement("div");
  const summary = document.createElement("p"), details = document.createElement("p");
  root.className = "gm-schedule"; summary.className = "gm-summary"; details.className = "gm-detail";
  summary.setAttribute("role", "status");
  summary.setAttribute("aria-live", "polite");
  root.append(summary, picture, details);
  el.append(root);
  // The sliders come without a name: give screen readers what the eye sees.
  const nameSliders = () => {
    for (const slider of el.closest(".widget-vbox")?.querySelectorAll(".widget-slider") ?? []) {
      const handle = slider.querySelector("[role=slider]"), readout = slider.querySelector(".widget-readout");
      handle?.setAttribute("aria-label", slider.querySelector(".widget-label")?.textContent ?? "");
      if (readout) handle?.setAttribute("aria-valuetext", readout.textContent);
    }
  };
  const update = () => {
    const svg = model.get("svg");
    if (picture.gmSvg !== svg) picture.innerHTML = picture.gmSvg = svg;
    summary.textContent = model.get("summary");
    details.textContent = model.get("details");
    requestAnimationFrame(nameSliders);
  };
  model.on("change", update);
  update();
  return () => model.off("change", update);
}

export default { render };
