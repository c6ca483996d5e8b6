// What one device holds, from the first kernel to the last.
function memory() {
  const M = D.memory, top = Math.max(M.fixed + Math.max(M.temporaries, ...M.curve.map(m => m[0])), 1), W = 1000, H = 180, n = Math.max(M.curve.length, 1);
  const y = b => H - 165 * b / top, x = i => W * i / n, fixed = y(M.fixed);
  const line = M.curve.map((m, i) => `${x(i).toFixed(1)},${y(M.fixed + m[0]).toFixed(1)} ${x(i + 1).toFixed(1)},${y(M.fixed + m[0]).toFixed(1)}`).join(" ");
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", class: "curve", tabindex: 0, role: "img", "aria-label": "Memory over the program; arrow keys go from kernel to kernel" });
  svg("rect", { x: 0, y: fixed, width: W, height: H - fixed, fill: "var(--compute)", opacity: 0.35 }, picture);
  svg("polygon", { points: `0,${fixed} ${line} ${W},${fixed}`, fill: "var(--memory)", opacity: 0.7 }, picture);
  const bar = svg("rect", { y: 0, width: 1, height: H, fill: "var(--ink)", opacity: 0 }, picture);
  const told = el("p", { className: "soft" }, `Arguments and results ${bytes(M.fixed)} (${bytes(M.arguments)} + ${bytes(M.results)}, ${bytes(M.shared)} shared), temporaries up to ${bytes(M.temporaries)}: peak ${bytes(M.fixed + M.temporaries)}${D.machine ? ` of ${bytes(D.machine.memory)}` : ""}. Totals ${M.by}; the curve and the arrays as scheduled.`);
  const now = el("p", { className: "m soft" }, "Point at the curve to see what runs.");
  let at = 0;
  const show = i => { at = Math.max(0, Math.min(n - 1, i)); const m = M.curve[at]; if (m) { now.textContent = `${bytes(M.fixed + m[0])} at ${m[1]}`; bar.setAttribute("x", x(at + 0.5)); bar.setAttribute("opacity", 0.6); } };
  picture.onmousemove = event => { const box = picture.getBoundingClientRect(); show(Math.floor(n * (event.clientX - box.left) / box.width)); };
  picture.onkeydown = event => { const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]; if (step) { show(at + step); event.preventDefault(); } };
  $("curve").replaceChildren(told, picture, now);
  const columns = [
    { name: "alive at the peak", kind: "m", cell: a => a[0], sort: a => a[0] }, { name: "count", kind: "n", cell: a => a[4], sort: a => a[4] },
    { name: "bytes", kind: "n", cell: a => bytes(a[1]), sort: a => a[1] }, { name: "array", cell: a => a[2], sort: a => a[2] }, { name: "line", cell: a => lineLink(a[3]), sort: a => a[3] }];
  table("alive", columns, M.alive.filter(a => (!chosen.line || a[3] === chosen.line) && matches(...a)));
  if (M.more[0]) $("alive").append(el("p", { className: "soft" }, `and ${M.more[0]} smaller ones with ${bytes(M.more[1])}`));
}
