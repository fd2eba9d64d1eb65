// The sections of a sweep. The data are its report.json (docs/sweep.md) and the remarks of its text report.

function sweepSections(data) {
  const { sweep } = data;
  const hosts = sweep.hosts.length ? sweep.hosts : [sweep.host];
  const origin = `${sweep.steps} steps, ${sweep.repeat} repeats, commit ${sweep.commits.join(", ") || sweep.commit || "unknown"}, `
    + `${hosts.join(", ")}, ${sweep.created}`;
  const remarks = element("ul", {}, ...data.remarks.map((remark) => element("li", {}, ...prose(remark))));
  return [element("p", { class: "muted" }, origin), section("Rows", data.times.length ? "The fastest row of each group is marked; the remarks say which differences may be noise." : null, sweepTable(data)),
    data.remarks.length ? section("Remarks", null, remarks) : null, ...sweepCharts(data.rows)].filter((part) => part !== null);
}

/** Formats the GiB of each pipeline rank; for more than four ranks, the smallest and the largest. */
function perRank(sizes) {
  if (!sizes) return NONE;
  if (sizes.length > 4) return `${gib(Math.min(...sizes))} to ${gib(Math.max(...sizes))}`;
  return sizes.map((bytes) => gib(bytes)).join(" \u00b7 ");
}

function sweepTable(data) {
  const from = (kind, name) => (row) => row[kind]?.[name] ?? null;
  const column = (title, unit, kind, name, text) => {
    const value = from(kind, name);
    return { title, unit, number: true, value, text: (row) => text(value(row)) };
  };
  const memory = (title, kind) => {
    const sizes = from(kind, "memory_bytes");
    return { title, unit: "GiB per rank", number: true, muted: kind === "predicted" && data.rows.some((row) => row.measured?.is_process_memory), value: (row) => (sizes(row) ? Math.max(...sizes(row)) : null), text: (row) => perRank(sizes(row)) };
  };
  const hasRepeats = (row) => row.measured !== null && row.measured.repeats > 1;
  const columns = [
    { title: "row", number: true, value: (row) => row.row },
    ...data.axes.map((flag) => ({ title: flag, wide: true, value: (row) => row.settings[flag] ?? null, text: (row) => row.settings[flag] ?? NONE })),
    { title: "status", value: (row) => row.status, node: (row) => element("span", { class: ["ok", "planned"].includes(row.status) ? "good" : "bad" }, row.status) },
    column("time", "s/step", "measured", "step_s", seconds),
    { title: "spread", unit: "%", number: true, value: (row) => (hasRepeats(row) ? row.measured.spread : null), text: (row) => (hasRepeats(row) ? percent(row.measured.spread) : NONE) },
    column("ratio", "", "measured", "ratio", (value) => fixed(value, 3)),
    column("throughput", "tokens/s", "measured", "tokens_per_s", fixed),
    column("loss", "", "measured", "loss", (value) => fixed(value, 4)),
    memory("memory", "measured"),
    column("bubble", "%", "measured", "bubble", percent),
    column("planned time", "s/step", "predicted", "step_s", seconds),
    memory("planned memory", "predicted"),
    column("planned bubble", "%", "predicted", "bubble", percent),
    column("max/mean", "", "predicted", "max_over_mean", (value) => fixed(value, 3)),
    { title: "processes", number: true, value: (row) => row.processes || null },
  ].filter((one) => data.rows.some((row) => one.value(row) !== null && one.value(row) !== undefined));
  return sortableTable(columns, data.rows, { id: "sweep", label: "rows of the sweep", isSelected: (row) => data.times.some((one) => one.fastest === row.row) }).node;
}

/** Returns bar charts of the time, largest memory and bubble of each row, measured and predicted. */
function sweepCharts(rows) {
  const known = rows.filter((row) => row.measured || row.predicted);
  const largest = (values) => (values.memory_bytes?.length ? Math.max(...values.memory_bytes) / GIB : null);
  const share = (values) => (typeof values.bubble === "number" ? 100 * values.bubble : null);
  const charts = [
    ["Time", "s per step; the line is the range of the repeats", (values) => values.step_s],
    ["Memory", "GiB of the most loaded pipeline rank", largest],
    ["Bubble", "% of a step", share],
  ];
  return charts.map(([title, unit, value]) => {
    const kinds = ["measured", "predicted"].filter((kind) => known.some((row) => row[kind] && value(row[kind]) !== null));
    return kinds.length ? section(title, unit, legend(kinds.map((kind) => [kind, kind])), rowBars(known, kinds, value, title === "Time")) : null;
  });
}

function rowBars(rows, kinds, value, withRange) {
  const [left, right, slot] = [330, 1100, 14 * kinds.length + 6];
  const values = rows.flatMap((row) => [row.measured, row.predicted].filter(Boolean).flatMap((one) => [value(one), withRange ? one.step_s_most : null]));
  const most = 1.08 * Math.max(...values.filter((one) => typeof one === "number"), 1e-12);
  const x = (amount) => left + ((right - left - 60) * amount) / most;
  const image = drawn("svg", { viewBox: `0 0 ${right} ${rows.length * slot + 24}`, role: "img", "aria-label": "bars; the table has the numbers" });
  const axis = ticks(0, most);
  for (const tick of axis.values) {
    image.append(drawn("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: rows.length * slot }),
      drawn("text", { x: x(tick), y: rows.length * slot + 16, "text-anchor": "middle" }, fixed(tick, axis.decimals)));
  }
  rows.forEach((row, index) => {
    const y = index * slot + 3;
    const name = `${row.row}: ${Object.values(row.settings).join(", ") || "base command"}`;
    image.append(drawn("text", { x: left - 10, y: y + 4 + 7 * kinds.length, "text-anchor": "end" }, drawn("title", {}, row.label), name.length > 46 ? `${name.slice(0, 45)}\u2026` : name));
    kinds.forEach((kind, place) => {
      const amount = row[kind] ? value(row[kind]) : null;
      if (typeof amount !== "number") return;
      const top = y + 14 * place;
      image.append(drawn("rect", { x: left, y: top, width: Math.max(x(amount) - left, 0.5), height: 12, style: `fill: var(--${kind})` }),
        drawn("text", { x: x(Math.max(amount, (withRange && row[kind].step_s_most) || 0)) + 6, y: top + 10.5 }, seconds(amount)));
      if (withRange && row[kind].repeats > 1) {
        image.append(drawn("line", { class: "whisker", x1: x(row[kind].step_s_least), x2: x(row[kind].step_s_most), y1: top + 6, y2: top + 6 }));
      }
    });
  });
  return image;
}
