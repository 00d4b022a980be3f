// An explorer's answer: a picture, and the verdict in words, in a live region that stays while the picture is redrawn.

function render({ model, el }) {
  const root = document.createElement("div"), picture = document.createElement("div");
  const [verdict, detail, state] = ["gm-verdict", "gm-detail", "gm-state"].map((name) => {
    const line = document.createElement("p");
    line.className = name;
    return line;
  });
  root.className = "gm-explorer";
  for (const line of [verdict, state]) {
    line.setAttribute("role", "status");
    line.setAttribute("aria-live", "polite");
  }
  root.append(verdict, picture, detail, state);
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
    const svg = model.get("svg");
    if (picture.gmSvg !== svg) picture.innerHTML = picture.gmSvg = svg;
    verdict.textContent = model.get("verdict");
    verdict.classList.toggle("gm-fits", model.get("fits") === true);
    verdict.classList.toggle("gm-exceeds", model.get("fits") === false);
    detail.textContent = model.get("detail");
    // What will change in a moment fades, and need not be read out twice.
    const isPending = model.get("pending");
    verdict.setAttribute("aria-busy", isPending);
    root.classList.toggle("gm-waiting", isPending);
    state.textContent = isPending ? "Computing the exact bytes; this is the closed form's answer." : "";
    requestAnimationFrame(nameSliders);
  };
  model.on("change", update);
  update();
  return () => model.off("change", update);
}

export default { render };
