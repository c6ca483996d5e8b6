// The user's files, with what each line costs.
const MADE = new Set(D.tensors.map(t => t.place)), EMITTED = {}, CAUSED = {};
D.collectives.forEach(c => { CAUSED[c.cause] = (CAUSED[c.cause] || 0) + 1; if (c.emitted !== c.cause) EMITTED[c.emitted] = (EMITTED[c.emitted] || 0) + 1; });

function source() {
  const most = Math.max(1, ...Object.values(D.lines).map(line => line[1])), kept = $("files").scrollTop;
  const changed = D.difference ? Object.fromEntries(D.difference.lines.map(line => [line.place, line.after.sent - line.before.sent])) : null;
  $("files").replaceChildren(...D.files.map(file => {
    const box = el("div", { className: "source" }, el("div", { className: "file m" }, file.name, file.lines.some(([, text]) => text.trim()) ? "" : el("span", { className: "soft" }, "  not on this machine")));
    let last = 0, made = 0;
    for (const [n, text] of file.lines) {
      const at = `${file.name}:${n}`, cost = D.lines[at], has = cost || MADE.has(at) || EMITTED[at];
      if (chosen.query && !matches(text, at)) continue;
      if (last && n > last + 1) box.append(el("div", { className: "gap" }, "⋯"));
      last = n; made++;
      box.append(sourceRow(at, n, text, cost, has, most, changed));
    }
    return made ? box : el("span");
  }));
  $("files").scrollTop = kept;
}

function sourceRow(at, n, text, cost, has, most, changed) {
  const sent = cost && cost[1] ? bytes(cost[1]) : EMITTED[at] ? "↳" : "";
  const row = el("div", { className: `row m${has ? " has" : ""}${chosen.line === at ? " picked" : ""}${changed ? " changes" : ""}` },
    el("span", { className: "soft" }, n),
    el("span", { title: EMITTED[at] ? `${EMITTED[at]} collectives are emitted here that other lines cause` : "" }, sent),
    el("span", { className: "soft time" }, cost && cost[0] ? seconds(cost[0]) : ""));
  if (changed) row.append(el("span", { className: change(changed[at] || 0) }, changed[at] ? signed(changed[at], bytes) : ""));
  row.append(el("code", { title: text.trim() }, text || " "));
  row.dataset.at = at;
  if (cost && cost[1] && chosen.line !== at) {
    row.style.borderLeftColor = "var(--hot)";
    row.style.background = `color-mix(in srgb, var(--hot) ${Math.round(4 + 30 * cost[1] / most)}%, transparent)`;
  }
  if (!has) return row;
  row.tabIndex = 0;
  row.setAttribute("role", "button");
  row.setAttribute("aria-pressed", String(chosen.line === at));
  const toggle = () => choose("line", chosen.line === at ? "" : at);
  row.onclick = toggle;
  row.onkeydown = event => {
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") { toggle(); [...$("files").querySelectorAll(".row")].find(r => r.dataset.at === at)?.focus(); event.preventDefault(); }
    if (way) { const rows = [...$("files").querySelectorAll(".row.has")]; rows[rows.indexOf(row) + way]?.focus(); event.preventDefault(); }
  };
  return row;
}
