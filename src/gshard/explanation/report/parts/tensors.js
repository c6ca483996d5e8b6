// Arguments and the arrays inside: sharding, bytes, the chain of reasons back to a mark, and the slice of each device.
function chain(row, dim) {
  const list = el("ol"), seen = new Set();
  let at = row, d = dim;
  while (at !== undefined && !seen.has(at)) {
    seen.add(at);
    const t = D.tensors[at], r = t.reasons.find(r => r[0] === d);
    if (!r) break;
    list.append(el("li", { className: "m" }, `${t.name}  ${t.sharding}: ${r[1]}`));
    at = r[2] < 0 ? undefined : r[2];
    d = r[3];
  }
  return list;
}

function reasons(t) {
  if (!t.reasons.length) return el("p", {}, t.note || "No mark and no neighbour asks to split it: every device holds all of it.");
  return el("div", {}, ...t.reasons.flatMap(r => [el("span", { className: "soft" }, `dimension ${r[0]}`), chain(t.i, r[0])]));
}

const why = t => t.reason || t.note || "replicated: replicated: no mark splits it";
const picks = { details: reasons, pick: t => { chosen.tensor = t.i; devices(); } };

function argumentTable() {
  const rows = D.tensors.map((t, i) => ({ ...t, i })).filter(t => t.argument && (!chosen.line || t.read.includes(chosen.line)) && matches(t.name, t.short, t.sharding, t.spec, t.reason));
  table("argument-table", [
    { name: "name", kind: "m", cell: t => el("span", { title: t.name }, t.short), sort: t => t.short }, { name: "shape", kind: "m", cell: t => `${t.dtype}[${t.shape.join(",")}]`, sort: t => t.shape.length },
    { name: "PartitionSpec", kind: "m", cell: t => t.spec, sort: t => t.spec }, { name: "bytes", kind: "n", cell: t => bytes(t.bytes), sort: t => t.bytes },
    { name: "per device", kind: "n", cell: t => bytes(t.local), sort: t => t.local }, { name: "reason", cell: why, sort: why }],
    rows, { ...picks, show: 30, empty: chosen.line && !chosen.query ? `${chosen.line} reads no argument itself` : "nothing here" });
}

// Arrays that differ in nothing but their number are one row: those of equal layers, say.
function tensors() {
  const groups = new Map();
  D.tensors.forEach((t, i) => {
    if (t.argument || (chosen.line && t.place !== chosen.line) || !matches(t.name, t.sharding, t.place, t.reason)) return;
    const name = t.name.replace(/^%\d+ /, ""), key = [name, t.sharding, t.reason, t.note].join("|");
    if (groups.has(key)) groups.get(key).count++;
    else groups.set(key, { ...t, i, count: 1, what: name.split(" at ")[0] });
  });
  table("tensor-table", [
    { name: "array", kind: "m", cell: t => t.count > 1 ? `${t.what} ×${t.count}` : t.what, sort: t => t.what }, { name: "line", cell: t => t.place ? lineLink(t.place) : "", sort: t => t.place },
    { name: "sharding", kind: "m", cell: t => t.sharding, sort: t => t.sharding }, { name: "bytes", kind: "n", cell: t => bytes(t.bytes), sort: t => t.bytes },
    { name: "per device", kind: "n", cell: t => bytes(t.local), sort: t => t.local }, { name: "nearest reason ← mark", cell: why, sort: why }], [...groups.values()], { ...picks, show: 20 });
}

function devices() {
  const t = D.tensors[chosen.tensor];
  if (!t) return;
  $("chosen").textContent = `${t.name}  ${t.sharding}${t.dims ? "" : ": the program does not tell which slice each device holds"}`;
  if (!t.dims) { $("mesh").replaceChildren(); return; }
  const total = Math.min(D.mesh.size, 2048), columns = columnsOf(total);
  $("mesh").style.gridTemplateColumns = `repeat(${columns}, minmax(0, ${total > 64 ? "20px" : "190px"}))`;
  $("mesh").replaceChildren(...[...Array(total).keys()].map(position => {
    let part = 0, parts = 1;
    const slice = t.shape.map((n, d) => {
      let p = 0, c = 1;
      for (const atom of t.dims[d]) { p = p * SIZE[atom] + digit(position, atom); c *= SIZE[atom]; }
      part = part * c + p; parts *= c;
      const each = Math.ceil(n / c);
      return c === 1 ? ":" : `${Math.min(n, p * each)}:${Math.min(n, (p + 1) * each)}`;
    });
    const text = `device ${device(position)}: [${slice.join(", ")}]`;
    return el("div", { className: "m", title: text, style: { background: `hsl(${parts === 1 ? 210 : Math.round(360 * part / parts)} 60% 76%)` } }, total > 64 ? "" : text.replace("device ", ""));
  }));
}
