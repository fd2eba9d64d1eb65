// The sections about token files. The data are the result of megatron.data.statistics.dataset_statistics.

function dataSections(data) {
  return [dataFigures(data), ...lengthSections(data.lengths), section("Data sets", setsNote(data), setsTable(data)),
    repeatedSection(data), examplesSection(data)].filter((part) => part !== null);
}

const sumOf = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0);

function dataFigures(data) {
  const [documents, tokens] = ["documents", "tokens"].map((name) => sumOf(data.sets, name));
  const decoded = data.sets.filter((one) => one.bytes_per_token !== null);
  const figures = [figure("data sets", fixed(data.sets.length)), figure("documents", fixed(documents)),
    figure("tokens", fixed(tokens)), figure("tokens per document", fixed(tokens / documents, 1)),
    figure("duplicates within data sets", percent(sumOf(data.sets, "duplicates") / documents), "% of documents")];
  if (decoded.length) {
    const bytes = decoded.reduce((sum, one) => sum + one.tokens * one.bytes_per_token, 0);
    figures.push(figure("text", fixed(bytes / sumOf(decoded, "tokens"), 2), "bytes per token"));
  }
  return element("section", {}, element("div", { class: "figures" }, ...figures));
}

const range = (row) => (row.shortest < 2 ? String(row.shortest) : `${fixed(row.shortest)} to ${fixed(2 * row.shortest - 1)}`);

function lengthSections(lengths) {
  const shares = (name, color) => {
    const total = sumOf(lengths, name);
    const columns = lengths.map((row) => ({ name: fixed(row.shortest), title: `${range(row)} tokens: ${fixed(row[name])} ${name}`,
      parts: [{ name, color, value: (100 * row[name]) / total }] }));
    return stackedColumns(columns, [], "%", `shortest document of the column, tokens; share of all ${name}`);
  };
  const count = (title) => ({ title, number: true, value: (row) => row[title] });
  const columns = [{ title: "length", unit: "tokens", number: true, value: (row) => row.shortest, text: range }, count("documents"), count("tokens")];
  return [section("Lengths of documents", "Documents by their number of tokens.", shares("documents", "measured")),
    section("Tokens by length", "Tokens in documents of these lengths.", shares("tokens", "predicted"),
      sortableTable(columns, lengths, { id: "lengths", label: "lengths of documents" }).node)];
}

function setsNote(data) {
  const sample = data.sampled > 1 ? ` Estimated from the documents with 1 of ${fixed(data.sampled)} hashes.` : "";
  return `Duplicates repeat all tokens of an earlier document of the data set; shared documents are in another data set, too.${sample}`;
}

function setsTable(data) {
  const total = sumOf(data.sets, "tokens");
  const count = (title, name, unit) => ({ title, unit, number: true, value: (row) => row[name] });
  const columns = [
    { title: "data set", wide: true, value: (row) => row.prefix }, count("tokens", "tokens"),
    { title: "share", unit: "%", number: true, value: (row) => row.tokens / total, text: (row) => percent(row.tokens / total) },
    count("documents", "documents"), count("empty", "empty", "documents"),
    { title: "mean", unit: "tokens", number: true, value: (row) => row.tokens / row.documents, text: (row) => fixed(row.tokens / row.documents, 1) },
    count("shortest", "shortest", "tokens"), count("longest", "longest", "tokens"),
    { title: "text", unit: "bytes per token", number: true, value: (row) => row.bytes_per_token, text: (row) => fixed(row.bytes_per_token, 2) },
    count("duplicates", "duplicates", "documents"), count("shared", "duplicates_of_others", "documents"),
    { title: "tokenizer", wide: true, value: (row) => row.tokenizer },
  ];
  return sortableTable(columns, data.sets, { id: "sets", label: "data sets" }).node;
}

function documentsTable(rows, id, label, decoded) {
  const columns = [
    { title: "data set", wide: true, value: (row) => row.prefix },
    { title: "document", number: true, value: (row) => row.document }, { title: "tokens", number: true, value: (row) => row.tokens },
    { title: "copies", number: true, value: (row) => row.copies ?? null },
    { title: decoded ? "text" : "token ids", wide: true, value: (row) => row.text },
  ].filter((column) => column.title !== "copies" || id === "repeated");
  return sortableTable(columns, rows, { id, label }).node;
}

function repeatedSection(data) {
  if (!data.repeated.length) return null;
  return section("Most repeated documents", "The first copy, and the copies in all data sets.",
    documentsTable(data.repeated, "repeated", "most repeated documents", data.decoded));
}

function examplesSection(data) {
  const note = data.decoded ? "Beginnings of some documents." : "Beginnings of some documents. With the flags of the tokenizer they are decoded.";
  return section("Examples", note, documentsTable(data.examples, "examples", "beginnings of documents", data.decoded));
}
