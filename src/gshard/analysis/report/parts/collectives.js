// Every collective: what it moves, what it costs, the line that causes it and the line where it is emitted.
function collectives() {
  const rows = D.collectives.map((c, i) => ({ ...c, i })).filter(c => isOf(c) && matches(c.kind, c.axes, c.line, c.cause, c.emitted, c.why, c.moved, c.shape));
  const columns = [
    { name: "kind", cell: c => c.times > 1 ? `${c.kind} ×${c.times}` : c.kind, sort: c => c.kind },
    { name: "over", cell: c => c.axes, sort: c => c.axes },
    { name: "bytes", kind: "n", cell: c => bytes(c.bytes), sort: c => c.bytes },
    { name: "time", kind: "n", cell: c => seconds(c.seconds), sort: c => c.seconds },
    { name: "caused at", cell: c => placeLink(c.cause), sort: c => c.cause },
    { name: "emitted at", cell: c => c.emitted === c.cause ? el("span", { className: "soft m" }, "same line") : placeLink(c.emitted), sort: c => c.emitted }];
  table("collective-table", columns, rows, {
    show: 12, empty: chosen.line && !chosen.query ? `${chosen.line} causes no communication, and none is emitted there` : "nothing here", details: about, picked: c => c.i === chosen.row,
    pick: c => { chosen.row = c.i; exchange(); document.querySelectorAll("#collective-table tr[data-i]").forEach(r => r.setAttribute("aria-selected", String(Number(r.dataset.i) === c.i))); } });
}

function about(c) {
  return el("div", {},
    el("p", { className: "m" }, c.moved || c.shape), el("p", {}, `Needed for: ${c.why}. Local operand ${c.shape}. `, c.advice),
    c.proposal ? el("p", {}, c.proposal) : null,
    el("p", { className: "soft" }, `Caused at ${c.line || "the border"}${c.emitted && c.emitted !== c.cause ? `; emitted at ${c.emitted}, where what it makes is first used` : ""}.`),
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
