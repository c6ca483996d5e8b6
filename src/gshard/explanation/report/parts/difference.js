// Two plans by line: what became more (red) and what less (green).
function difference() {
  const X = D.difference;
  document.querySelector("nav a[href='#difference']").hidden = $("difference").hidden = !X;
  if (!X) return;
  const totals = [["sent by each device", X.before.sent, X.after.sent, bytes], ["time of a call", X.before.seconds, X.after.seconds, seconds], ["FLOPs per device", X.before.flops, X.after.flops, flop], ["peak memory of a device", X.before.peak, X.after.peak, bytes]];
  $("difference-totals").replaceChildren(el("p", { className: "soft" }, `From ${X.names[0]} to ${X.names[1]}.`), el("div", { className: "tiles" }, ...totals.filter(([name, a, b]) => a !== null && b !== null && (a || b || name !== "time of a call")).map(([name, a, b, show]) =>
    el("div", { className: "tile" }, el("b", {}, `${show(a)} → ${show(b)}`), el("span", { className: change(b - a) }, b === a ? "unchanged" : `${signed(b - a, show)}${a ? ` (${signed((b - a) / a, percent)})` : ""}`), el("span", { className: "soft" }, ` ${name}`)))));
  const delta = (what, show) => ({ name: what === "sent" ? "bytes" : what === "flops" ? "FLOPs" : "time", kind: "n", cell: r => el("span", { className: change(r.after[what] - r.before[what]) }, signed(r.after[what] - r.before[what], show)), sort: r => r.after[what] - r.before[what] });
  const columns = [
    { name: "line", cell: r => KNOWN.has(r.place) ? placeLink(r.place) : el("span", { className: "m" }, r.place), sort: r => r.place },
    { name: "", kind: "m", cell: r => r.text.trim() },
    { name: "before", kind: "n", cell: r => bytes(r.before.sent), sort: r => r.before.sent }, { name: "after", kind: "n", cell: r => bytes(r.after.sent), sort: r => r.after.sent },
    delta("sent", bytes), delta("flops", flop), delta("seconds", seconds)];
  table("difference-table", columns, X.lines.map((r, i) => ({ ...r, i })).filter(r => (!chosen.line || r.place === chosen.line) && matches(r.place, r.text)));
}
