// Every collective, those of equal layers in one row: what it moves, in which module, what it costs, the line that causes it and the line where it is emitted.
function collectives() {
  const rows = D.collectives.map((c, i) => ({ ...c, i })).filter(c => isOf(c) && matches(c.kind, c.axes, c.array, c.module, ...c.layers.flat(), c.line, c.cause, c.emitted, c.why, c.moved, c.shape));
  const columns = [
    { name: "kind", cell: c => above(broken(c.times > 1 ? `${c.kind} ×${c.times}` : c.kind), `over ${c.axes}`), sort: c => `${c.kind} ${c.axes}` },
    { name: "array", kind: "m name", cell: c => above(broken(alike(c)), c.module && broken(`in ${c.module}`)), sort: c => `${c.array} ${c.module}` },
    { name: "bytes", kind: "n", cell: c => bytes(c.bytes), sort: c => c.bytes },
    ...D.machine ? [{ name: "time", kind: "n", cell: c => above(seconds(c.seconds), c.hidden > 0.005 && `${percent(c.hidden)} hidden`), sort: c => c.seconds }] : [],
    { name: "caused at", cell: c => above(placeLink(c.cause), c.emitted !== c.cause && el("span", { title: "emitted at" }, "↳ ", placeLink(c.emitted))), sort: c => c.cause }];
  table("collective-table", columns, rows, {
    show: 12, empty: chosen.line && !chosen.query ? `${chosen.line} causes no communication, and none is emitted there` : "nothing here", details: about, picked: c => c.i === chosen.row,
    pick: c => { chosen.row = c.i; exchange(); document.querySelectorAll("#collective-table tr[data-i]").forEach(r => r.setAttribute("aria-selected", String(Number(r.dataset.i) === c.i))); } });
}

// A name that may be broken where a word of it begins.
const broken = text => el("span", {}, ...text.split(/(?<=[./_])/).flatMap((word, i) => i ? [el("wbr"), word] : [word]));
const above = (text, below) => el("span", {}, text, below ? el("div", { className: "soft" }, below) : null);
const alike = c => c.layers.length ? `${c.array} ×${c.layers.length}` : c.array;

// Of a row that stands for equal layers: each of them.
function layers(c) {
  return el("details", {}, el("summary", {}, `each of the ${c.layers.length}`),
    el("ul", {}, ...c.layers.map(([array, module, times, sent]) => el("li", { className: "m" }, `${[array, module].filter(Boolean).join("  ")}: ×${times}, ${bytes(sent)}`))));
}

function about(c) {
  return el("div", {},
    el("p", { className: "m" }, c.moved || c.shape), el("p", {}, `Needed for: ${c.why}. Local operand ${c.shape}. `, c.advice),
    c.proposal ? el("p", {}, c.proposal) : null, c.layers.length ? layers(c) : null,
    el("p", { className: "soft" }, `Caused at ${c.line || "no known line"}${c.emitted && c.emitted !== c.cause ? `; emitted at ${c.emitted}, where what it makes is first used` : ""}.`),
    el("p", { className: "m soft" }, D.groups[c.group]));
}

function times() {
  const whole = r => Object.keys(BOUNDS).reduce((sum, what) => sum + r[what], 0), most = Math.max(...D.time.map(whole), 1e-12);
  const columns = [
    { name: "operation", cell: r => ({ fused: "fused elementwise", product: "matrix product", operator: "other operator" })[r.class] || r.class, sort: r => r.class },
    { name: "time", kind: "n", cell: r => seconds(whole(r)), sort: whole },
    { name: "share", kind: "n", cell: r => percent(whole(r) / (D.totals.seconds || 1)), sort: whole },
    { name: "", cell: r => el("div", { className: "bar" }, ...Object.entries(BOUNDS).map(([k, name]) => el("i", { className: k, title: `${name}: ${seconds(r[k])}`, style: { width: `${100 * r[k] / most}%` } }))) },
    { name: "FLOPs", kind: "n", cell: r => r.flops ? flop(r.flops) : "", sort: r => r.flops },
    { name: "read and written", kind: "n", cell: r => bytes(r.moved), sort: r => r.moved },
    { name: "sent", kind: "n", cell: r => r.sent ? bytes(r.sent) : "", sort: r => r.sent }];
  table("time-table", columns, D.time.filter(r => matches(r.class)));
}
