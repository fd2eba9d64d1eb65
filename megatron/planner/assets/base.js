// Elements, numbers, sortable tables. All text is inserted as text nodes, so no value is parsed as HTML.

const GIB = 2 ** 30;
const NONE = "\u2013";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Returns an HTML element. Children are nodes, strings, or null, which is skipped. attributes.on: event -> handler. */
function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Returns an SVG element. */
function drawn(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

/** Formats a number with a fixed number of decimals and thousands separators. Unknown values are a dash. */
function fixed(value, decimals = 0) {
  if (value === null || value === undefined) return NONE;
  if (typeof value !== "number") return String(value); // "nan", "inf"
  const text = value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return /^-[0.]+$/.test(text) ? text.slice(1) : text; // no -0.0
}

const gib = (bytes, decimals = 2) => (typeof bytes === "number" ? fixed(bytes / GIB, decimals) : fixed(bytes));
const percent = (share, decimals = 1) => (typeof share === "number" ? fixed(100 * share, decimals) : fixed(share));

/** Formats seconds with four significant digits, without an exponent. */
function seconds(value) {
  if (typeof value !== "number") return fixed(value);
  if (value === 0) return "0";
  const digits = Math.floor(Math.log10(Math.abs(value))) + 1;
  return fixed(value, Math.min(Math.max(4 - digits, 0), 6));
}

/** Formats bytes in the largest unit in which the number is at least 1. */
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power < units.length - 1 && bytes >= 1024 ** (power + 1)) power += 1;
  return `${fixed(bytes / 1024 ** power, power ? 2 : 0)} ${units[power]}`;
}

/** Returns a text as nodes, so that no line breaks inside a flag such as --micro-batch-size. */
function prose(text) {
  return text.split(/(--[\w-]+)/).map((part) => (part.startsWith("--") ? element("span", { class: "flag" }, part) : part));
}

/** Returns a text as nodes, with a possible line break after each punctuation mark, so that no word is broken. */
function breakable(text) {
  return text.split(/(?<=[:|,/_.=-])/).flatMap((part, index) => (index ? [element("wbr"), part] : [part]));
}

function section(title, note, ...children) {
  const heading = element("h2", {}, title);
  return element("section", {}, heading, note ? element("p", { class: "note" }, ...prose(note)) : null, ...children);
}

/**
 * Returns a table whose column heads are buttons that sort it.
 * A column has: title; unit; value(row), by which rows are sorted; text(row) or node(row), which are shown instead
 * of the value; `number`, which aligns it right; `wide`, which wraps its text; `muted`, which greys it;
 * `isConstant`, a value: a column in which all rows have it is left out. Unknown values are sorted last in both
 * directions.
 */
function sortableTable(all, rows, options = {}) {
  const columns = all.filter((column) => column.isConstant === undefined || rows.some((row) => column.value(row) !== column.isConstant));
  let sorted = null;
  let direction = 1;
  const body = element("tbody");
  const heads = columns.map((column) => {
    const unit = column.unit ? element("span", { class: "unit" }, ` ${column.unit}`) : null;
    const title = element("span", { class: "title" }, column.title);
    const button = element("button", { type: "button", on: { click: () => sort(column) } }, title, unit);
    const align = column.number ? "number" : null;
    return element("th", { scope: "col", class: align, "aria-sort": "none" }, button);
  });

  function sort(column) {
    direction = sorted === column ? -direction : 1;
    sorted = column;
    heads.forEach((head, index) => {
      const order = direction > 0 ? "ascending" : "descending";
      head.setAttribute("aria-sort", columns[index] === column ? order : "none");
    });
    show();
  }

  function compare(a, b) {
    const [x, y] = [sorted.value(a), sorted.value(b)];
    const [known, other] = sorted.number
      ? [typeof x === "number", typeof y === "number"]
      : [x !== null && x !== undefined, y !== null && y !== undefined];
    if (!known || !other) return Number(other) - Number(known);
    return direction * (sorted.number ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  }

  function show() {
    const ordered = sorted ? [...rows].sort(compare) : rows;
    body.replaceChildren(...ordered.map((row) => {
      const kind = (column) => ["number", "wide", "muted"].filter((name) => column[name]).join(" ") || null;
      const cells = columns.map((column) => element("td", { class: kind(column) }, ...content(column, row)));
      return element("tr", { class: options.isSelected?.(row) ? "selected" : null }, ...cells);
    }));
  }

  function shown(column, row) {
    if (column.node) return column.node(row);
    if (column.text) return column.text(row);
    const value = column.value(row);
    return column.number ? fixed(value) : String(value ?? NONE);
  }

  /** Returns the content of a cell; long names may break after punctuation. */
  function content(column, row) {
    const found = shown(column, row);
    return column.wide && typeof found === "string" ? breakable(found) : [found];
  }

  show();
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  return { node: element("div", { class: "scroll", tabindex: 0, id: options.id, role: "region",
    "aria-label": options.label }, table), show };
}

/** Returns a legend. entries: [[name, color variable or CSS class of a rule]] */
function legend(entries) {
  return element("ul", { class: "legend" }, ...entries.map(([name, color]) => {
    const swatch = color.startsWith("rule")
      ? element("span", { class: `swatch ${color}` })
      : element("span", { class: "swatch", style: `background: var(--${color})` });
    return element("li", {}, swatch, name);
  }));
}

/** Returns a value in large type with its name and unit. */
function figure(name, value, unit = "") {
  return element("div", { class: "figure" }, element("div", { class: "name" }, name),
    element("div", { class: "value" }, value, unit ? element("span", { class: "unit" }, ` ${unit}`) : null));
}
