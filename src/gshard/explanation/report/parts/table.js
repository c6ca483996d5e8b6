// Tables: sorted by a click on a heading, rows opened by a click or by Enter, as many as fit at first.
const SHOW = 40, NARROW = matchMedia("(max-width: 640px)");
const tables = {}; // by id: how many rows are shown, and by which column they are sorted

// columns: { name, kind ("n" a number, "m" code), cell(row), sort(row) }; rows: each with its number as ``i``.
function table(id, columns, rows, { details, picked, pick, show = SHOW, empty = "nothing here" } = {}) {
  const state = tables[id] ??= { limit: NARROW.matches ? Math.min(show, 5) : show, by: -1, down: true };
  const sorted = [...rows];
  if (state.by >= 0) {
    const value = columns[state.by].sort, way = state.down ? -1 : 1;
    sorted.sort((a, b) => { const x = value(a), y = value(b); return way * (x < y ? -1 : x > y ? 1 : 0); });
  }
  const body = el("tbody");
  for (const row of sorted.slice(0, state.limit)) {
    const line = el("tr", {}, ...columns.map(c => {
      const cell = el("td", { className: c.kind || "" }, c.cell(row));
      if (c.name) cell.dataset.name = c.name;
      return cell;
    }));
    if (picked) line.setAttribute("aria-selected", picked(row));
    if (details || pick) opens(line, row, columns.length, details, pick);
    body.append(line);
  }
  const head = el("tr", {}, ...columns.map((c, at) => heading(id, c, at, state)));
  const box = [el("table", {}, el("thead", {}, head), body)];
  if (sorted.length > state.limit) {
    const more = el("button", { className: "more" }, `${sorted.length - state.limit} more`);
    more.onclick = () => { state.limit *= 4; draw(); };
    box.push(more);
  }
  if (!rows.length) box.push(el("p", { className: "soft" }, empty));
  $(id).replaceChildren(...box);
}

function heading(id, column, at, state) {
  const cell = el("th", { className: column.kind === "n" ? "n" : "", scope: "col" });
  if (!column.sort || !column.name) { cell.append(column.name || ""); return cell; }
  const here = state.by === at, button = el("button", { title: `sort by ${column.name}` }, `${column.name}${here ? (state.down ? " ↓" : " ↑") : ""}`);
  button.onclick = () => {
    Object.assign(state, here ? { down: !state.down } : { by: at, down: column.kind === "n" });
    draw();
    $(id).querySelectorAll("th")[at].querySelector("button").focus();
  };
  if (here) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
  cell.append(button);
  return cell;
}

function opens(line, row, span, details, pick) {
  line.dataset.i = row.i;
  line.tabIndex = 0;
  if (details) line.setAttribute("aria-expanded", "false");
  const open = () => {
    const next = line.nextSibling, isOpen = next && next.className === "why";
    if (isOpen) next.remove();
    else if (details) line.after(el("tr", { className: "why" }, el("td", { colSpan: span }, details(row))));
    if (details) line.setAttribute("aria-expanded", String(!isOpen));
    if (pick) pick(row);
  };
  line.onclick = open;
  line.onkeydown = event => {
    if (event.target !== line) return;
    if (event.key === "Enter" || event.key === " ") { open(); event.preventDefault(); }
    const to = event.key === "ArrowDown" ? "nextSibling" : event.key === "ArrowUp" ? "previousSibling" : "";
    let other = to && line[to];
    while (other && other.className === "why") other = other[to];
    if (other) { other.focus(); event.preventDefault(); }
  };
}
