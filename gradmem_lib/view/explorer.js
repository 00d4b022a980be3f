// An explorer's answer: a picture, and the verdict in words, in a live region that stays while the picture is redrawn.
const PATIENCE = 300; // milliseconds, after which a wait is said

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
  let timer;
  const wait = (waiting) => {
    root.classList.toggle("gm-waiting", waiting);
    state.textContent = waiting ? "Computing the exact bytes…" : "";
  };
  const update = () => {
    const svg = model.get("svg");
    if (picture.gmSvg !== svg) picture.innerHTML = picture.gmSvg = svg;
    verdict.textContent = model.get("verdict");
    verdict.classList.toggle("gm-fits", model.get("fits") === true);
    verdict.classList.toggle("gm-exceeds", model.get("fits") === false);
    detail.textContent = model.get("detail");
    // What will change in a moment need not be read out twice.
    verdict.setAttribute("aria-busy", model.get("pending"));
    if (model.get("pending")) timer ??= setTimeout(wait, PATIENCE, true);
    else {
      clearTimeout(timer);
      timer = undefined;
      wait(false);
    }
    requestAnimationFrame(nameSliders);
  };
  model.on("change", update);
  update();
  return () => {
    model.off("change", update);
    clearTimeout(timer);
  };
}

export default { render };
