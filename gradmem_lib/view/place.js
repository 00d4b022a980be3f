// Puts a widget into an element of an ordinary HTML output. What stays in a file is the HTML, with its still content;
// the widget takes the still's place while its kernel lives, and gives it back afterwards.

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a kernel's states without an answer
const message = (type) => ({ type, isConflatable: false, conflate: () => false });

function initialize({ model }) {
  const manager = model.widget_manager, keep = model.get("keep");
  const views = new Map(); // by the element that holds it
  let lost = false;
  let focused = false; // whether the reader was in the widget, also when its output was replaced under it

  const mount = async (host) => {
    views.set(host, null);
    const inner = await manager.get_model(model.get("view").slice("IPY_MODEL_".length));
    const view = await manager.create_view(inner);
    if (lost) return;
    const live = document.createElement("div");
    // What Lumino's Widget.attach does: sliders measure themselves when they hear of it.
    view.luminoWidget.processMessage(message("before-attach"));
    live.append(view.el);
    for (const still of host.children) still.hidden = true;
    host.append(live);
    view.luminoWidget.processMessage(message("after-attach"));
    views.set(host, { view, live });
    live.addEventListener("change", () => acknowledge(live));
    live.addEventListener("focusin", () => { focused = true; });
    // An output that is replaced loses the focus while it is still on the page, so ask afterwards.
    live.addEventListener("focusout", () => setTimeout(() => { if (live.isConnected) focused = false; }));
  };
  // A kernel that runs a cell answers afterwards: say so at once.
  const acknowledge = (live) => {
    const { kernel } = manager;
    if (kernel?.status !== "busy" || live.querySelector(".gm-busy")) return;
    const line = document.createElement("p");
    line.className = "gm-busy";
    line.setAttribute("role", "status");
    line.textContent = "A cell is running: what you entered is taken when it has ended.";
    live.append(line);
    const wait = (_, status) => {
      if (status === "busy") return;
      kernel.statusChanged.disconnect(wait);
      line.remove();
    };
    kernel.statusChanged.connect(wait);
  };
  // Its parts come one by one, so this is tried again whenever the page has changed.
  const giveFocusBack = () => {
    if (!focused || document.activeElement !== document.body) return;
    for (const mounted of views.values()) {
      if (mounted?.live.isConnected) mounted.live.querySelector("input")?.focus();
    }
  };
  const search = () => {
    const hosts = document.querySelectorAll(`[data-gradmem-place="${model.get("place")}"]`);
    for (const host of hosts) if (!views.has(host)) mount(host);
    giveFocusBack();
  };
  const observer = new MutationObserver(search);
  const leave = () => {
    if (lost) return;
    lost = true;
    observer.disconnect();
    for (const [host, mounted] of views) {
      if (!mounted || keep) continue; // a recording says itself that it has ended
      mounted.live.remove();
      for (const still of host.children) still.hidden = false;
    }
  };

  model.on("comm_live_update", () => { if (manager.kernel === null || GONE.includes(manager.kernel?.status)) leave(); });
  manager.kernel?.statusChanged?.connect((_, status) => { if (GONE.includes(status)) leave(); });
  manager.kernel?.disposed?.connect(leave);
  observer.observe(document.body, { childList: true, subtree: true });
  search();
  return () => observer.disconnect();
}

export default { initialize };
