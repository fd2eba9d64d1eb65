// Axes, stacked columns, and a bar of shares, as SVG and HTML.

/** Returns round values that divide the range from .. to into about `count` parts, and their number of decimals. */
function ticks(from, to, count = 6) {
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let index = Math.ceil(from / step - 1e-9) + 0; index * step <= to * (1 + 1e-9); index += 1) found.push(index * step);
  return { values: found, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

/**
 * Draws stacked columns, and limits as horizontal lines. Values are in `unit`.
 * columns: [{name, title, parts: [{name, color, value}]}]; limits: [{value, solid}].
 */
function stackedColumns(columns, limits, unit, axisName) {
  const [left, top, height, foot] = [52, 16, 260, 40];
  const slot = Math.max(Math.min(1090 / columns.length, 130), 7);
  const width = left + Math.max(columns.length * slot, 320) + 8;
  const totals = columns.map((column) => column.parts.reduce((sum, part) => sum + part.value, 0));
  const most = 1.06 * Math.max(...totals, ...limits.map((limit) => limit.value));
  const y = (value) => top + height * (1 - value / most);
  const image = drawn("svg", { viewBox: `0 0 ${width} ${top + height + foot}`, width, role: "img",
    "aria-label": `${axisName}, stacked columns in ${unit}; the table below has the numbers` });
  const axis = ticks(0, most);
  for (const value of axis.values) {
    image.append(drawn("line", { class: "grid", x1: left, x2: width, y1: y(value), y2: y(value) }),
      drawn("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, fixed(value, axis.decimals)));
  }
  const labelled = Math.ceil(24 / slot);
  columns.forEach((column, index) => {
    const x = left + index * slot;
    const gap = Math.min(0.2 * slot, 14);
    const stack = drawn("g", {}, drawn("title", {}, column.title));
    let below = 0;
    for (const part of column.parts.filter((one) => one.value > 0)) {
      stack.append(drawn("rect", { x: x + gap, width: slot - 2 * gap, y: y(below + part.value),
        height: y(below) - y(below + part.value), style: `fill: var(--${part.color})` }));
      below += part.value;
    }
    if (slot >= 40) {
      stack.append(drawn("text", { x: x + slot / 2, y: y(below) - 5, "text-anchor": "middle" }, fixed(below, 1)));
    }
    image.append(stack);
    if (index % labelled === 0) {
      image.append(drawn("text", { x: x + slot / 2, y: top + height + 16, "text-anchor": "middle" }, column.name));
    }
  });
  for (const limit of limits) {
    image.append(drawn("line", { class: limit.solid ? "limit solid" : "limit", x1: left, x2: width,
      y1: y(limit.value), y2: y(limit.value) }));
  }
  image.append(drawn("text", { x: left, y: top + height + 34 }, axisName),
    drawn("text", { x: left - 8, y: 11, "text-anchor": "end" }, unit));
  return image;
}

/** Returns a bar of shares with its legend. parts: [{name, color, value}]; the values are parts of `total`. */
function shareBar(parts, total) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": "shares, listed below" });
  for (const part of parts.filter((one) => one.value > 0)) {
    const style = `flex: ${part.value / total}; background: var(--${part.color})`;
    bar.append(element("span", { style, title: `${part.name}: ${seconds(part.value)} s` }));
  }
  const entries = parts.map((part) => [`${part.name} ${percent(part.value / total)} %`, part.color]);
  return [bar, legend(entries)];
}
