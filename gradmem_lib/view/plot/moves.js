// What a reader does: keys, the pointer, the wheel, two fingers. Each becomes one of the picture's `actions`.

const DRAG = 4; // pixels that a pointer moves before it pans

export function listen(canvas, actions) {
  listenToKeys(canvas, actions);
  listenToPointer(canvas, actions);
  canvas.addEventListener("dblclick", actions.showAll);
  canvas.addEventListener("blur", actions.leave);
}

function listenToKeys(canvas, actions) {
  canvas.addEventListener("keydown", (event) => {
    if (!actions.isReady() || event.ctrlKey || event.metaKey || event.altKey) return;
    const many = event.shiftKey;
    const keys = {
      arrowright: () => actions.step(1, many), arrowleft: () => actions.step(-1, many),
      arrowup: () => actions.climb(1, many), arrowdown: () => actions.climb(-1, many),
      home: actions.toStart, end: actions.toEnd, p: actions.toPeak, escape: actions.letGo,
      enter: actions.pinUnder, g: actions.regroup,
      "+": () => actions.zoom(0.6), "=": () => actions.zoom(0.6), "-": () => actions.zoom(1 / 0.6), 0: actions.showAll,
    };
    const action = keys[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}

// Of the pointers that are down, where each one is: one pans, two pinch.
function listenToPointer(canvas, actions) {
  const down = new Map();
  let isDrag = false, isOver = false; // the pointer has moved here: a page that scrolls by goes on to scroll
  const xOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const yOf = (event) => event.clientY - canvas.getBoundingClientRect().top;

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return; // the main button, or a finger
    down.set(event.pointerId, xOf(event));
    isDrag = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!actions.isReady()) return;
    const x = xOf(event), from = down.get(event.pointerId);
    if (event.movementX || event.movementY) isOver = true;
    if (from === undefined) return actions.point(x, yOf(event));
    if (!isDrag && Math.abs(x - from) < DRAG) return;
    isDrag = true;
    down.set(event.pointerId, x);
    if (down.size === 1) return actions.isWhole() ? actions.point(x, yOf(event)) : actions.pan(x - from);
    const [, other] = [...down].find(([id]) => id !== event.pointerId);
    actions.zoom(Math.abs(from - other) / Math.max(Math.abs(x - other), 1), other);
  });
  canvas.addEventListener("pointerup", (event) => {
    const wasDown = down.delete(event.pointerId);
    if (wasDown && !isDrag && actions.isReady()) actions.click(xOf(event), yOf(event));
  });
  canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
  canvas.addEventListener("pointerleave", (event) => {
    isOver = false;
    if (event.pointerType === "mouse" && document.activeElement !== canvas) actions.leave();
  });
  canvas.addEventListener("wheel", (event) => {
    const pageScrolls = actions.isWhole() && event.deltaY > 0; // nothing to zoom out to
    if (!actions.isReady() || pageScrolls || !(isOver || event.ctrlKey)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) actions.pan(-event.deltaX);
    else actions.zoom(1.0015 ** event.deltaY, xOf(event));
  }, { passive: false });
}
