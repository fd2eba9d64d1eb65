// Shows the data of the page.

function main() {
  const page = JSON.parse(document.getElementById("data").textContent);
  const sections = {
    plan: () => planSections(page.data),
    search: () => layoutsSections(page.data, true),
    recipe: () => layoutsSections(page.data, false),
    sweep: () => sweepSections(page.data),
    data: () => dataSections(page.data),
  };
  document.getElementById("page").replaceChildren(element("h1", {}, page.title), element("p", { class: "note" }, `made ${page.made}`), ...sections[page.kind](),
    element("section", {}, element("h2", {}, "Command"), element("pre", {}, ...prose(page.command))));
}

main();
