// A box above every long table, which leaves the rows that hold all of its words. Without it the tables are as they are.
(() => {
  const isChinese = document.documentElement.lang.startsWith("zh");
  for (const table of document.querySelectorAll("article table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 20) continue;
    const box = document.createElement("input");
    const said = document.createElement("output");
    box.type = "search";
    box.setAttribute("aria-label", isChinese ? "在表中查找" : "Search the table");
    box.placeholder = isChinese ? "查找，例如 llama packed" : "Search, such as llama packed";
    box.style.cssText = "font: inherit; padding: .3em .6em; margin: .5em 1em .5em 0; max-width: 90%; color: inherit; background: transparent; border: 1px solid currentColor; border-radius: 4px";
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const show = () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      rows.forEach((row, at) => {
        row.hidden = !words.every((word) => texts[at].includes(word));
        left += row.hidden ? 0 : 1;
      });
      said.textContent = isChinese ? `${left} / ${rows.length} 行` : `${left} of ${rows.length} rows`;
    };
    box.addEventListener("input", show);
    const place = document.createElement("div");
    place.append(box, said);
    (table.closest(".table-wrapper") ?? table).before(place);
    show();
  }
})();
