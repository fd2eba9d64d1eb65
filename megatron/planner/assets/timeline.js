// The pipeline schedule: a lane per rank, a rectangle per pass. Users can zoom it and move it along the time axis.

const LANE = { left: 58, right: 1100, top: 6 };
const SHORTEST = 1e-6; // the shortest visible range, as a fraction of the whole timeline

/** Returns the timeline with its controls. events: passes of the plan; ranks: number of lanes. */
function timeline(events, ranks) {
  const end = Math.max(...events.map((event) => event.end));
  const height = ranks > 32 ? 15 : 24; // of a lane
  const bottom = LANE.top + ranks * height;
  const view = { from: 0, to: end };
  const image = drawn("svg", { class: "timeline", id: "timeline", viewBox: `0 0 ${LANE.right + 8} ${bottom + 26}`,
    tabindex: 0, role: "application", "aria-label": "Timeline of the schedule. Plus and minus zoom, arrows move, 0 shows all." });
  const shown = element("output", { id: "timeline-range" });
  const readout = element("p", { class: "note", "aria-live": "polite" }, "Point at a pass to read its times.");
  const x = (time) => LANE.left + ((time - view.from) / (view.to - view.from)) * (LANE.right - LANE.left);

  function lanes() {
    const names = drawn("g");
    for (let rank = 0; rank < ranks; rank += 1) {
      const y = LANE.top + rank * height;
      names.append(drawn("text", { x: LANE.left - 8, y: y + height / 2 + 4, "text-anchor": "end" }, `rank ${rank}`));
    }
    return names;
  }

  /** Draws all passes of one kind, of the first stages (or the later ones) of all ranks, as one path: there are thousands. */
  function passes(kind, second) {
    const labels = [];
    let path = "";
    for (const event of events) {
      if (event.end <= view.from || event.start >= view.to || event.kind !== kind || (event.stage >= ranks) !== second) continue;
      const [left, right] = [Math.max(x(event.start), LANE.left), Math.min(x(event.end), LANE.right)];
      const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.4);
      const y = LANE.top + event.rank * height + 2;
      path += `M${left.toFixed(2)} ${y}h${width.toFixed(2)}v${height - 4}h${(-width).toFixed(2)}z`;
      if (width > 18) {
        labels.push(drawn("text", { class: "inside", x: left + width / 2, y: y + height / 2 + 2, "text-anchor": "middle" }, `${event.micro_batch}`));
      }
    }
    // The passes of a rank's later stages are lighter.
    return [drawn("path", { class: `passes ${kind}`, d: path, opacity: second ? 0.6 : null }), ...labels];
  }

  function words(event) {
    return `rank ${event.rank}, stage ${event.stage}: ${event.kind} pass of micro-batch ${event.micro_batch}, `
      + `${seconds(event.start)} s to ${seconds(event.end)} s (${seconds(event.end - event.start)} s)`;
  }

  function draw() {
    const kinds = ["forward", "backward", "weight"].flatMap((kind) => [...passes(kind, false), ...passes(kind, true)]);
    const axis = ticks(view.from, view.to, 8);
    const grid = axis.values.flatMap((time) => [
      drawn("line", { class: "grid", x1: x(time), x2: x(time), y1: LANE.top, y2: bottom }),
      drawn("text", { x: x(time), y: bottom + 17, "text-anchor": x(time) > LANE.right - 16 ? "end" : "middle" }, `${fixed(time, axis.decimals)} s`),
    ]);
    image.replaceChildren(lanes(), ...grid, ...kinds);
    image.dataset.from = view.from;
    image.dataset.to = view.to;
    shown.textContent = `${seconds(view.from)} s to ${seconds(view.to)} s of ${seconds(end)} s`;
  }

  function show(from, to) {
    const span = Math.min(Math.max(to - from, SHORTEST * end), end);
    view.from = Math.min(Math.max(from, 0), end - span);
    view.to = view.from + span;
    draw();
  }

  /** Divides the visible time range by `factor`. The time at `share` of the width stays in its place. */
  function zoom(factor, share = 0.5) {
    const span = (view.to - view.from) / factor;
    const fixedTime = view.from + share * (view.to - view.from);
    show(fixedTime - share * span, fixedTime + (1 - share) * span);
  }

  function move(share) {
    const by = share * (view.to - view.from);
    show(view.from + by, view.to + by);
  }

  /** Returns the pointer's horizontal position, as a share of the lanes' width. */
  function place(event) {
    const box = image.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * (LANE.right + 8);
    return Math.min(Math.max((inside - LANE.left) / (LANE.right - LANE.left), 0), 1);
  }

  /** Returns the pass under the pointer. */
  function under(event) {
    const box = image.getBoundingClientRect();
    const rank = Math.floor(((event.clientY - box.top) * ((LANE.right + 8) / box.width) - LANE.top) / height);
    const time = view.from + place(event) * (view.to - view.from);
    return events.find((one) => one.rank === rank && one.start <= time && time < one.end);
  }

  const keys = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), ArrowLeft: () => move(-0.2),
    ArrowRight: () => move(0.2), 0: () => show(0, end) };
  image.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  // Without Ctrl the wheel scrolls the page. Browsers report a pinch on a touchpad as a wheel event with Ctrl.
  image.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), place(event));
  }, { passive: false });
  let held = null;
  image.addEventListener("pointerdown", (event) => {
    held = place(event);
    image.setPointerCapture(event.pointerId);
    image.classList.add("dragged");
  });
  image.addEventListener("pointermove", (event) => {
    if (held === null) {
      const found = under(event);
      if (found) readout.textContent = words(found);
      return;
    }
    const now = place(event);
    move(held - now);
    held = now;
  });
  for (const name of ["pointerup", "pointercancel"]) {
    image.addEventListener(name, () => {
      held = null;
      image.classList.remove("dragged");
    });
  }

  const button = (id, text, label, action) => element("button", { class: "plain", type: "button", id,
    "aria-label": label, on: { click: action } }, text);
  const controls = element("div", { class: "controls" },
    button("zoom-in", "+", "zoom in", () => zoom(1.5)), button("zoom-out", "\u2212", "zoom out", () => zoom(1 / 1.5)),
    button("move-left", "\u2190", "earlier", () => move(-0.2)), button("move-right", "\u2192", "later", () => move(0.2)),
    button("zoom-reset", "show all", "show the whole timeline", () => show(0, end)), shown);
  draw();
  return [controls, image, readout];
}
