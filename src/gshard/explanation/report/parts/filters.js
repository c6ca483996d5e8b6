// What is chosen: a line, a text, a collective. Each is a chip that undoes it; Escape undoes the last.
const chosen = { line: "", query: "", row: D.collectives.length ? 0 : -1, tensor: 0 };
const undo = [];

const matches = (...texts) => chosen.query.toLowerCase().split(/\s+/).every(q => texts.some(t => String(t).toLowerCase().includes(q)));
const isOf = c => !chosen.line || c.cause === chosen.line || c.emitted === chosen.line;

function choose(what, value) {
  chosen[what] = value;
  const at = undo.indexOf(what);
  if (at >= 0) undo.splice(at, 1);
  if (value) undo.push(what);
  if (what === "query") $("search").value = value;
  if (what === "line" && value) {
    const first = D.collectives.findIndex(isOf);
    if (first >= 0) chosen.row = first;
  }
  draw();
}

// A place without what all places of this page have in common.
const short = place => D.files.length === 1 ? place.replace(/^.*:/, "line ") : place;

// A place in the source, as a button that chooses it.
function placeLink(place, text) {
  if (!place) return el("span", { className: "soft" }, text || "no known line");
  const link = el("button", { className: "link m place", title: `show ${place}` }, text || short(place));
  link.onclick = event => { event.stopPropagation(); choose("line", place); shown(place); };
  return link;
}

// The same under a heading that says "line".
const lineLink = place => placeLink(place, place && short(place).replace(/^line /, ""));

// Brings a line of the source into view, in its own pane.
function shown(place) {
  const row = [...$("files").querySelectorAll(".row")].find(r => r.dataset.at === place), pane = $("files");
  if (row) pane.scrollTop = row.offsetTop - pane.offsetTop - pane.clientHeight / 3;
}

function chips() {
  const chip = (text, what) => {
    const made = el("button", { className: "chip", "aria-label": `remove the filter ${text}` }, `${text}  ✕`);
    made.onclick = () => choose(what, "");
    return made;
  };
  const made = [];
  if (chosen.line) made.push(chip(`line ${chosen.line}`, "line"));
  if (chosen.query) made.push(chip(`“${chosen.query}”`, "query"));
  $("chips").replaceChildren(...made);
}

$("search").oninput = event => choose("query", event.target.value.trim());
document.addEventListener("keydown", event => {
  const typing = document.activeElement === $("search");
  if (event.key === "/" && !typing) { $("search").focus(); event.preventDefault(); }
  if (event.key === "Escape" && undo.length) { choose(undo[undo.length - 1], ""); event.preventDefault(); }
});
