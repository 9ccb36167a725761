(() => {
  "use strict";
  const { datasets, specs } = JSON.parse(document.getElementById("plots").textContent);

  const save = (name, content, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  // Data sets come as columns. Each plot gets rows of its own, because Vega writes into them.
  const rows = (columns) => {
    const names = Object.keys(columns);
    return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))) : [];
  };

  // A file knows no style sheet: it gets the colours that are seen now, on the page's own ground.
  const standalone = (place) => {
    const svg = place.querySelector("svg");
    const style = getComputedStyle(document.documentElement);
    const box = svg.viewBox.baseVal;
    const copy = svg.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    copy.setAttribute("style", "background: " + style.getPropertyValue("--paper"));
    const text = new XMLSerializer().serializeToString(copy);
    return { text: text.replace(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name).trim()), box, style };
  };
  const savePng = (place, name) => {
    const { text, box, style } = standalone(place);
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: 2 * box.width, height: 2 * box.height });
      const context = canvas.getContext("2d");
      context.fillStyle = style.getPropertyValue("--paper");
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(name, blob));
    });
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  };
  const offer = (place, name) => {
    const bar = document.createElement("div");
    bar.className = "save";
    for (const [kind, act] of [
      ["SVG", () => save(name + ".svg", standalone(place).text, "image/svg+xml")],
      ["PNG", () => savePng(place, name + ".png")],
    ]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = kind;
      button.setAttribute("aria-label", `Save ${place.closest("figure").querySelector("h3").textContent} as ${kind}`);
      button.addEventListener("click", act);
      bar.append(button, " ");
    }
    place.before(bar);
  };

  const draw = async (name, spec) => {
    const place = document.getElementById("plot-" + name);
    const named = new Set();
    JSON.stringify(spec, (key, value) => (key === "data" && value && value.name && named.add(value.name), value));
    const own = Object.fromEntries(
      Object.entries(datasets).filter(([key]) => named.has(key)).map(([key, columns]) => [key, rows(columns)]),
    );
    try {
      await vegaEmbed(place, { ...spec, datasets: { ...spec.datasets, ...own } }, {
        actions: false,
        renderer: "svg",
        defaultStyle: false,
        tooltip: { disableDefaultStyle: true },
      });
      offer(place, name);
    } catch (error) {
      place.classList.add("failed");
      place.textContent = "This plot could not be drawn: " + error.message;
    }
  };
  // One after another, so that the page can be read and scrolled meanwhile.
  (async () => {
    for (const [name, spec] of Object.entries(specs)) {
      await draw(name, spec);
      await new Promise((resolve) => setTimeout(resolve));
    }
    performance.mark("drawn");
    document.documentElement.dataset.drawn = "all";
  })();

  const table = document.getElementById("trials-table");
  if (table === null) return;
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  const names = heads.map((head) => head.textContent);
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
  for (const [column, head] of heads.entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(column, descending ? -1 : 1);
    });
  }

  const text = document.getElementById("filter-text");
  const outcome = document.getElementById("filter-outcome");
  const count = document.getElementById("filter-count");
  const contents = new Map(all.map((row) => [row, row.textContent.toLowerCase()]));
  const compare = {
    "=": (a, b) => a === b,
    "<": (a, b) => a < b,
    ">": (a, b) => a > b,
    "<=": (a, b) => a <= b,
    ">=": (a, b) => a >= b,
    "!=": (a, b) => a !== b,
  };
  // "r>=8" asks for a column that exists; every other word is looked for in the row's text.
  const condition = (word) => {
    const found = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.+)$/.exec(word);
    const column = found ? names.indexOf(found[1]) : -1;
    if (column < 0) return (row) => contents.get(row).includes(word.toLowerCase());
    const number = Number(found[3]);
    return (row) => {
      const value = key(row, column);
      return value !== null && compare[found[2]](value, typeof value === "number" ? number : found[3]);
    };
  };
  const filter = () => {
    const conditions = text.value.split(/\s+/).filter(Boolean).map(condition);
    let shown = 0;
    for (const row of all) {
      row.hidden = !(conditions.every((holds) => holds(row)) && (outcome.value === "" || row.dataset.outcome === outcome.value));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${all.length} trials`;
  };
  text.addEventListener("input", filter);
  outcome.addEventListener("change", filter);
  text.form.addEventListener("submit", (event) => event.preventDefault());

  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  document.getElementById("save-csv").addEventListener("click", () => {
    const lines = [names, ...Array.from(body.rows).filter((row) => !row.hidden).map((row) =>
      Array.from(row.cells, (cell) => (cell.classList.contains("n") ? cell.dataset.value : cell.textContent === "–" ? "" : cell.textContent)))];
    save("trials.csv", lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n", "text/csv");
  });
})();
