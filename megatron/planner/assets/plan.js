// The sections of a plan, and the table of a search or a recipe. A plan is the object that tools/plan.py --json writes.

const MEMORY_PARTS = ["state", "activations", "head", "temporaries", "tables"];
const CONTENT_COLORS = { embedding: "embedding", "transformer layer": "transformer", "LM head": "lm-head" };

function planSections(plan) {
  return [verdict(plan), planFigures(plan), stepSection(plan), stageSection(plan), memorySection(plan), scheduleSection(plan),
    communicationSection(plan), whatIfSection(plan)].filter((part) => part !== null);
}

function layoutWords(layout) {
  const context = layout.context_parallel > 1 ? `CP ${layout.context_parallel} \u00d7 ` : "";
  return `TP ${layout.tensor_parallel} \u00d7 ${context}PP ${layout.pipeline_parallel} \u00d7 DP ${layout.data_parallel}`
    + `${layout.expert_parallel !== null ? `, EP ${layout.expert_parallel}` : ""}, `
    + `micro-batch ${layout.micro_batch_size} \u00d7 ${layout.micro_batches} accumulation steps, ZeRO ${layout.zero_stage}, `
    + `recompute ${layout.recompute}, ${layout.schedule}, partition ${layout.partition_method}, ${layout.precision}`
    + `${layout.sequence_parallel ? ", sequence parallel" : ""}${layout.gpu ? `, ${layout.gpu}` : ""}`;
}

function planFigures(plan) {
  const { step } = plan;
  const figures = [
    figure("parameters", fixed(plan.parameters)),
    figure("devices", fixed(plan.layout.world_size)),
    figure("most loaded rank", gib(plan.peak_bytes), "GiB"),
  ];
  if (plan.active_parameters !== plan.parameters) figures.splice(1, 0, figure("parameters per token", fixed(plan.active_parameters)));
  if (plan.device_bytes !== null) figures.push(figure("device memory", gib(plan.device_bytes), "GiB"));
  if (step !== null) {
    figures.push(figure("step", seconds(step.total), "s"), figure("throughput", fixed(step.tokens_per_second), "tokens/s"),
      figure("per GPU, as logged", fixed(step.logged_tflops, 1), "TFLOP/s"), figure("MFU", percent(step.mfu), "%"),
      figure("pipeline bubble", percent(step.bubble), "%"));
    if (step.days !== null) figures.push(figure("whole run", fixed(step.days, 1), "days"));
  }
  return element("section", {}, element("p", {}, layoutWords(plan.layout)),
    element("div", { class: "figures" }, ...figures));
}

/** Returns whether the plan fits, what to change, and the doubt about its speed. */
function verdict(plan) {
  const doubt = plan.step?.doubt ? element("p", { class: "doubt" }, `Note: ${plan.step.doubt}.`) : null;
  if (!plan.verdict) return element("section", {}, element("p", { class: "note" }, "Set --gpu or --device-memory to check whether the plan fits."), doubt);
  const [headline, ...rest] = plan.verdict.split(": ");
  const [needs, advice] = rest.join(": ").split(/\. (?=Try )/);
  const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}`;
  return element("section", {}, element("p", { class: "verdict" },
    element("strong", { class: plan.fits ? "good" : "bad" }, sentence(headline))),
  advice ? element("p", {}, ...prose(advice), ".") : null, element("p", { class: "note" }, ...prose(sentence(needs)), "."), doubt);
}

/** Returns the seconds of the busiest rank by kind of work: the shares that tools/plan.py prints. */
function stepParts(step) {
  const busy = new Map();
  for (const stage of step.stages) {
    const sums = busy.get(stage.rank) ?? [0, 0, 0];
    [stage.matmul, stage.memory, stage.communication].forEach((value, index) => {
      sums[index] += step.micro_batches * value;
    });
    busy.set(stage.rank, sums);
  }
  const total = (sums) => sums.reduce((a, b) => a + b, 0);
  const [matmul, other, tensor] = [...busy.values()].reduce((a, b) => (total(b) > total(a) ? b : a));
  const waits = Math.max(step.pipeline - matmul - other - tensor, 0);
  return [
    { name: "matrix products", color: "matmul", value: matmul },
    { name: "other kernels", color: "other", value: other },
    { name: `collectives of TP, CP${step.has_experts ? ", EP" : ""} and ZeRO`, color: "tensor", value: tensor },
    { name: "waits in the pipeline", color: "waits", value: waits },
    { name: "gradient reduction", color: "reduction", value: step.reduction },
    { name: "optimizer", color: "optimizer", value: step.optimizer },
    { name: "weight gather", color: "gather", value: step.gather },
  ];
}

function stepSection(plan) {
  if (plan.step === null) return null;
  return section("Time of a step", "Step time of the busiest rank: predicted, not measured on a GPU. Use it to compare layouts.",
    ...shareBar(stepParts(plan.step), plan.step.total));
}

/** Returns a text such as 'embedding, 5 x transformer layer'. */
function contentWords(content) {
  const runs = [];
  for (const title of content) {
    const last = runs[runs.length - 1];
    if (last && last.title === title) last.count += 1;
    else runs.push({ title, count: 1 });
  }
  return runs.map((run) => (run.count > 1 ? `${run.count} \u00d7 ${run.title}` : run.title)).join(", ") || "nothing";
}

function stageMap(stage) {
  const side = stage.content.length > 24 ? 5 : 11;
  const image = drawn("svg", { width: Math.max(stage.content.length * (side + 2), 1), height: 18, role: "img", "aria-label": contentWords(stage.content) });
  stage.content.forEach((title, index) => {
    const color = CONTENT_COLORS[title] ?? "norm";
    image.append(drawn("rect", { x: index * (side + 2), y: 4, width: side, height: 11, rx: 1, style: `fill: var(--${color})` },
      drawn("title", {}, title)));
  });
  return image;
}

function stageSection(plan) {
  const times = plan.step === null ? null : plan.step.stages;
  const columns = [
    { title: "stage", number: true, value: (stage) => stage.stage },
    { title: "rank", number: true, value: (stage) => stage.rank },
    { title: "map", value: (stage) => contentWords(stage.content), node: stageMap },
    { title: "layers", value: (stage) => stage.layers },
    { title: "content", wide: true, value: (stage) => contentWords(stage.content) },
    { title: "parameters", number: true, value: (stage) => stage.parameters },
    { title: "weight", unit: plan.weight_unit, number: true, value: (stage) => stage.weight,
      text: (stage) => stage.weight.toLocaleString("en-US", { maximumSignificantDigits: 4 }) },
    { title: "in flight", number: true, value: (stage) => stage.in_flight },
  ];
  if (times) {
    for (const kind of ["forward", "backward"]) {
      columns.push({ title: kind, unit: "s", number: true, value: (stage) => times[stage.stage][kind],
        text: (stage) => seconds(times[stage.stage][kind]) });
    }
  }
  const entries = [...Object.entries(CONTENT_COLORS), ["norm and others", "norm"]];
  return section("Stages", "Layers: indices in the layer list. In flight: largest number of micro-batches whose activations the stage keeps. "
    + `Weight: as --partition-method ${plan.layout.partition_method} computes it.`,
  legend(entries), sortableTable(columns, plan.stages, { id: "stages", label: "stages" }).node);
}

function memorySection(plan) {
  const columns = plan.memory.map((part) => ({
    name: String(part.rank),
    title: [`rank ${part.rank}: ${gib(part.total)} GiB`, ...MEMORY_PARTS.map((name) => `${name} ${gib(part[name])} GiB`)].join("\n"),
    parts: MEMORY_PARTS.map((name) => ({ name, color: name, value: part[name] / GIB })),
  }));
  const limits = [];
  const entries = MEMORY_PARTS.map((name) => [name, name]);
  if (plan.device_bytes !== null) {
    limits.push({ value: plan.device_bytes / GIB, solid: true });
    limits.push({ value: (plan.device_bytes - plan.reserve_bytes) / GIB, solid: false });
    entries.push([`device, ${gib(plan.device_bytes)} GiB`, "rule solid"], ["device minus reserve", "rule"]);
  }
  const names = plan.memory.some((part) => part.host > 0) ? [...MEMORY_PARTS, "total", "host"] : [...MEMORY_PARTS, "total"];
  const table = sortableTable([
    { title: "rank", number: true, value: (part) => part.rank },
    ...names.map((name) => ({ title: name, unit: "GiB", number: true, value: (part) => part[name], text: (part) => gib(part[name], 3) })),
  ], plan.memory, { id: "memory", label: "memory of each pipeline rank" });
  return section("Memory", "Peak memory per device of each pipeline rank during a step.",
    legend(entries), stackedColumns(columns, limits, "GiB", "pipeline rank"), table.node);
}

function scheduleSection(plan) {
  if (!plan.timeline.length) return null;
  const all = plan.layout.micro_batches;
  const few = plan.timeline_micro_batches < all ? ` with ${plan.timeline_micro_batches} micro-batches (a step has ${all})` : "";
  const second = plan.stages.length > plan.memory.length ? " Passes of a rank's later stages are lighter." : "";
  const entries = [["forward", "forward"], ["backward", "backward"]];
  if (plan.timeline.some((event) => event.kind === "weight")) entries.push(["weight gradients", "weight"]);
  return section("Schedule", `${plan.layout.schedule}${few}. Numbers are micro-batches.${second} Drag to move, Ctrl and wheel to zoom. `
    + "Keyboard: + and \u2212 zoom, arrows move, 0 shows all.",
  legend(entries), ...timeline(plan.timeline, plan.memory.length));
}

function communicationSection(plan) {
  const ranks = plan.memory.map((part) => part.rank);
  const bytesOf = (rows) => rows.reduce((sum, row) => sum + row.bytes, 0);
  const ofRank = (rank) => plan.communication.filter((row) => row.rank === rank);
  const busiest = ranks.reduce((a, b) => (bytesOf(ofRank(b)) > bytesOf(ofRank(a)) ? b : a));
  const content = element("div");
  const show = (rank) => {
    const rows = ofRank(rank);
    const groups = [...new Set(rows.map((row) => row.group))].map((group) => {
      const own = rows.filter((row) => row.group === group);
      return { group, calls: own.reduce((sum, row) => sum + row.calls, 0), bytes: bytesOf(own) };
    });
    content.replaceChildren(groupTable(groups), callTable(rows));
  };
  const choice = element("select", { id: "rank", on: { change: () => show(Number(choice.value)) } },
    ...ranks.map((rank) => element("option", { value: rank, selected: rank === busiest ? "" : null }, `${rank}`)));
  show(busiest);
  return section("Communication", "Calls of one device per step. Bytes count full tensors: the output of an all-gather, the input of a "
    + "reduce-scatter, the tensor of an all-reduce.",
  element("div", { class: "controls" }, element("label", { for: "rank" }, "pipeline rank"), choice), content);
}

function groupTable(groups) {
  const most = Math.max(...groups.map((row) => row.bytes), 1);
  const meter = (row) => element("span", { class: "meter" }, element("span", { style: `width: ${(100 * row.bytes) / most}%` }));
  return sortableTable([
    { title: "process group", value: (row) => row.group },
    { title: "share", value: (row) => String(row.bytes), node: meter },
    { title: "calls", number: true, value: (row) => row.calls },
    { title: "bytes", number: true, value: (row) => row.bytes },
    { title: "size", number: true, value: (row) => row.bytes, text: (row) => size(row.bytes) },
  ], groups, { id: "groups", label: "communication of each process group" }).node;
}

function callTable(rows) {
  const table = sortableTable([
    { title: "process group", value: (row) => row.group },
    { title: "operation", value: (row) => row.operation },
    { title: "during", value: (row) => row.during },
    { title: "calls", number: true, value: (row) => row.calls },
    { title: "bytes", number: true, value: (row) => row.bytes },
    { title: "size", number: true, value: (row) => row.bytes, text: (row) => size(row.bytes) },
  ], rows, { id: "calls", label: "communication by pass" });
  return element("details", {}, element("summary", {}, "by operation and pass"), table.node);
}

function whatIfSection(plan) {
  if (!plan.what_if.length) return null;
  const base = plan.step.tokens_per_second;
  const relative = (row) => (row.tokens_per_second === null ? null : row.tokens_per_second / base - 1);
  const sign = (value) => (value === null ? NONE : `${value >= 0 ? "+" : "\u2212"}${percent(Math.abs(value))}`);
  const answer = (row) => (row.fits === null ? "rejected" : row.fits ? "yes" : "no");
  const note = "One change at a time, relative to this plan. The fastest that fits and computes the same numbers is marked."
    + (plan.stages.length > 1 ? " Partition methods that give the same stages are not listed." : "");
  return section("What if", note, sortableTable([
    { title: "change", value: (row) => row.change },
    { title: "throughput", unit: "tokens/s", number: true, value: (row) => row.tokens_per_second },
    { title: "relative", unit: "%", number: true, value: relative, text: (row) => sign(relative(row)) },
    { title: "most loaded rank", unit: "GiB", number: true, value: (row) => row.peak_bytes, text: (row) => gib(row.peak_bytes) },
    { title: "fits", value: answer, node: (row) => element("span", { class: row.fits ? "good" : row.reason ? "muted" : "bad" }, answer(row)) },
    { title: "reason", wide: true, isConstant: "", value: (row) => row.reason, node: (row) => element("span", { class: "note" }, ...prose(row.reason)) },
  ], plan.what_if, { id: "what-if", label: "effect of one change at a time", isSelected: (row) => row.change === plan.best_change }).node);
}

/** Returns a table of the layouts of a search or the steps of a recipe; the chosen plan is shown below the table. */
function layoutsSections(data, isSearch) {
  const plans = (isSearch ? data.candidates : data.steps).map((plan, index) => ({ number: index + 1, what_if: [], ...plan }));
  const below = element("div", { id: "chosen" });
  let chosen = plans[0];
  const choose = (plan) => {
    chosen = plan;
    table.show();
    below.replaceChildren(element("h2", {}, `${isSearch ? "Layout" : "Step"} ${plan.number}`), element("pre", {}, ...prose(commandOf(plan))), ...planSections(plan));
  };
  const button = (plan) => element("button", { class: "plain", type: "button", "aria-pressed": String(plan === chosen),
    "aria-label": `show ${plan.number}`,
    on: { click: () => { choose(plan); table.node.querySelector('[aria-pressed="true"]').focus(); } } }, `${plan.number}`);
  const layout = (title, name, number = true) => ({ title, number, value: (plan) => plan.layout[name], text: (plan) => String(plan.layout[name]) });
  const doubted = (plan) => element("span", plan.step.doubt ? { class: "doubted", title: plan.step.doubt } : {}, percent(plan.step.mfu));
  const columns = [
    { title: "show", number: true, value: (plan) => plan.number, node: button },
    { title: "throughput", unit: "tokens/s", number: true, value: (plan) => plan.step.tokens_per_second },
    { title: "step", unit: "s", number: true, value: (plan) => plan.step.total, text: (plan) => seconds(plan.step.total) },
    { title: "MFU", unit: "%", number: true, value: (plan) => plan.step.mfu, node: doubted },
    { title: "bubble", unit: "%", number: true, value: (plan) => plan.step.bubble, text: (plan) => percent(plan.step.bubble) },
    { title: "most loaded rank", unit: "GiB", number: true, value: (plan) => plan.peak_bytes, text: (plan) => gib(plan.peak_bytes) },
    layout("TP", "tensor_parallel"), { ...layout("CP", "context_parallel"), isConstant: 1 }, layout("PP", "pipeline_parallel"), layout("DP", "data_parallel"), { ...layout("EP", "expert_parallel"), isConstant: null }, layout("ZeRO", "zero_stage"),
    layout("micro-batch", "micro_batch_size"), { ...layout("recompute", "recompute", false), isConstant: "none" }, layout("schedule", "schedule", false),
    { title: "SP", isConstant: "no", value: (plan) => (plan.layout.sequence_parallel ? "yes" : "no") },
    { ...layout("partition", "partition_method", false), wide: true },
  ];
  if (!isSearch) {
    columns.splice(1, 0, { title: "step of the recipe", wide: true, value: (plan) => plan.text },
      { title: "fits", value: (plan) => (plan.fits ? "yes" : "no") });
  }
  const table = sortableTable(columns, plans, { id: "layouts", label: "layouts", isSelected: (plan) => plan === chosen });
  choose(chosen);
  const doubts = plans.some((plan) => plan.step.doubt) ? " MFU in italics: no published run has reached it." : "";
  const note = (isSearch
    ? `${fixed(data.planned)} layouts planned in full. The table has the fastest ${plans.length} that fit.`
    : "The steps are in the recipe's order.") + `${plans.some((plan) => plan.layout.sequence_parallel) ? " SP: sequence parallel." : ""}${doubts}`;
  return [section(isSearch ? "Layouts" : "Steps", note, table.node), below];
}

/** Returns the command line of a plan, quoted for a shell. */
function commandOf(plan) {
  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
  return ["pretrain_gpt.py", ...plan.flags].map(quoted).join(" ");
}
