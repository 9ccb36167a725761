(() => {
  "use strict";
  const { datasets, specs } = JSON.parse(document.getElementById("plots").textContent);

  // Data sets come as columns. Each plot gets rows of its own, because Vega writes into them.
  const rows = (columns) => {
    const names = Object.keys(columns);
    return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))) : [];
  };
  const draw = async (name, spec) => {
    const place = document.getElementById("plot-" + name);
    const own = Object.fromEntries(Object.entries(datasets).map(([key, columns]) => [key, rows(columns)]));
    await vegaEmbed(place, { ...spec, datasets: { ...spec.datasets, ...own } }, {
      actions: false,
      renderer: "svg",
      defaultStyle: false,
      tooltip: { disableDefaultStyle: true },
    }).catch((error) => {
      place.classList.add("failed");
      place.textContent = "This plot could not be drawn: " + error.message;
    });
  };
  // One after another, so that the page can be read and scrolled meanwhile.
  (async () => {
    for (const [name, spec] of Object.entries(specs)) {
      await draw(name, spec);
      await new Promise((resolve) => setTimeout(resolve));
    }
  })();

  const table = document.getElementById("trials-table");
  const body = table.tBodies[0];
  const all = Array.from(body.rows);
  const collator = new Intl.Collator(undefined, { numeric: true });
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.classList.contains("n") ? (cell.dataset.value === "" ? null : Number(cell.dataset.value)) : cell.textContent;
  };
  const sort = (column, sign) => {
    const keyed = all.map((row) => [key(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // missing values stay last either way
      return sign * (typeof a === "number" ? a - b : collator.compare(a, b));
    });
    body.append(...keyed.map(([, row]) => row));
  };
  for (const [column, head] of Array.from(table.tHead.rows[0].cells).entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(column, descending ? -1 : 1);
    });
  }

  const text = document.getElementById("filter-text");
  const outcome = document.getElementById("filter-outcome");
  const count = document.getElementById("filter-count");
  const contents = new Map(all.map((row) => [row, row.textContent.toLowerCase()]));
  const filter = () => {
    const wanted = text.value.trim().toLowerCase();
    let shown = 0;
    for (const row of all) {
      row.hidden = !contents.get(row).includes(wanted) || (outcome.value !== "" && row.dataset.outcome !== outcome.value);
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${all.length} trials`;
  };
  text.addEventListener("input", filter);
  outcome.addEventListener("change", filter);
  text.form.addEventListener("submit", (event) => event.preventDefault());
})();
