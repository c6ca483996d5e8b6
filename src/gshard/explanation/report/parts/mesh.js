// The mesh, and who sends what to whom in the chosen collective.
const SIZES = D.mesh.atoms, STRIDE = {};
{ let stride = D.mesh.size; for (const [atom, n] of SIZES) { stride /= n; STRIDE[atom] = stride; } }
const SIZE = Object.fromEntries(SIZES), DRAWN = 256;
const device = position => D.mesh.order.length ? D.mesh.order[position] : position;
const digit = (position, atom) => Math.floor(position / STRIDE[atom]) % SIZE[atom];
let sender = 0;

function columnsOf(total) {
  const last = D.mesh.axes[D.mesh.axes.length - 1][1];
  return D.mesh.axes.length > 1 && last <= 32 ? last : total > 64 ? 32 : Math.min(total, 8);
}

// The positions that one position forms a group with, in the order in which a permutation counts them.
function group(position, atoms) {
  const base = position - atoms.reduce((sum, atom) => sum + digit(position, atom) * STRIDE[atom], 0);
  return atoms.reduce((all, atom) => all.flatMap(at => [...Array(SIZE[atom]).keys()].map(k => at + k * STRIDE[atom])), [base]);
}

// The positions of the group of a collective that a position is in.
const membersOf = (c, position) => c.groups.length ? c.groups.find(g => g.includes(position)) || [position] : group(position, c.group ? c.group.split(",") : []);

// Whom a position sends to, and how many bytes to each.
function receivers(c, position) {
  const each = c.times ? c.bytes / c.times : 0;
  if (c.kind === "collective_permute") {
    const all = group(position, c.over);
    return c.pairs.filter(([a, b]) => all[a] === position && a !== b).map(([, b]) => [all[b], each]);
  }
  const members = membersOf(c, position);
  return members.filter(m => m !== position).map(m => [m, each / (members.length - 1)]);
}

const SAYS = { all_gather: "its part", all_reduce: "parts of the sum, and what it has summed,", reduce_scatter: "a different part of the sum", all_to_all: "a different slice", collective_permute: "its part" };

function exchange(asked) {
  const c = D.collectives[chosen.row];
  $("exchange").hidden = !c || D.mesh.size < 2;
  if ($("exchange").hidden) return;
  if (asked !== undefined) sender = asked;
  else if (!receivers(c, sender).length) sender = Math.max(0, [...Array(D.mesh.size).keys()].findIndex(d => receivers(c, d).length));
  const total = Math.min(D.mesh.size, DRAWN), columns = columnsOf(total), wide = 620 / columns, small = wide < 44, high = small ? Math.max(wide, 14) : 40, gap = small ? 2 : 12;
  const rows = Math.ceil(total / columns), picture = svg("svg", { viewBox: `0 0 620 ${rows * (high + gap) + 24}`, class: "exchange", role: "group", "aria-label": "devices" });
  const first = new Map(), to = receivers(c, sender);
  const middle = position => [(position % columns + 0.5) * wide, (Math.floor(position / columns) + 0.5) * (high + gap)];
  for (let position = 0; position < total; position++) {
    const key = membersOf(c, position)[0];
    if (!first.has(key)) first.set(key, first.size);
    const [x, y] = middle(position), others = to.some(([m]) => m === position);
    const made = svg("g", { class: "device", tabindex: 0, role: "button", "aria-label": `device ${device(position)}` }, picture);
    svg("rect", { x: x - wide / 2 + gap / 2, y: y - high / 2, width: wide - gap, height: high, rx: small ? 2 : 6, fill: `hsl(${(first.get(key) * 137.5 + 210) % 360} 60% ${others || position === sender ? 68 : 84}%)`, stroke: position === sender ? "var(--network)" : "none", "stroke-width": 3 }, made);
    svg("title", {}, made).textContent = `device ${device(position)}: ${D.mesh.axes.length > 1 ? coordinates(position) : ""}`;
    if (!small) svg("text", { x, y }, made).textContent = device(position);
    made.onclick = () => exchange(position);
    made.onkeydown = event => { if (event.key === "Enter" || event.key === " ") { exchange(position); $("senders").querySelectorAll("g.device")[position].focus(); event.preventDefault(); } };
  }
  to.filter(([m]) => m < total).slice(0, 64).forEach(([m]) => arrow(picture, middle(sender), middle(m)));
  $("senders").replaceChildren(el("p", {}, ...sentence(c, to)), picture, el("p", { className: "soft" }, `Each colour is a group over ${c.axes}. Select a device to see whom it sends to.${D.mesh.size > total ? ` The first ${total} of ${D.mesh.size} devices.` : ""}`));
}

function coordinates(position) {
  let rest = position;
  return [...D.mesh.axes].reverse().map(([name, n]) => { const at = rest % n; rest = Math.floor(rest / n); return `${name}=${at}`; }).reverse().join(" ");
}

function sentence(c, to) {
  const names = to.slice(0, 8).map(([m]) => device(m)).join(", ") + (to.length > 8 ? `, … (${to.length} devices)` : "");
  const what = to.length ? `device ${device(sender)} sends ${SAYS[c.kind] || "its part"} (${bytes(to[0][1])}) to ${to.length > 1 ? "each of " : "device "}${names}` : `device ${device(sender)} sends nothing`;
  return [el("b", {}, c.kind), ` of ${c.shape} over ${c.axes}: ${what}${c.times > 1 ? (c.kind === "collective_permute" && to.length > 1 ? `, in ${c.times} rounds` : `, ${c.times} times a call`) : ""}. `, placeLink(c.cause)];
}

function arrow(picture, [x1, y1], [x2, y2]) {
  const dx = x2 - x1, dy = y2 - y1, long = Math.hypot(dx, dy) || 1, bend = Math.min(60, 16 + long / 7), cut = Math.min(20, long / 3);
  const ax = x1 + dx / long * cut, ay = y1 + dy / long * cut, bx = x2 - dx / long * cut, by = y2 - dy / long * cut;
  svg("path", { d: `M${ax} ${ay} Q${(x1 + x2) / 2 - dy / long * bend} ${(y1 + y2) / 2 + dx / long * bend} ${bx} ${by}` }, picture);
  svg("circle", { cx: bx, cy: by, r: 3.5, fill: "var(--network)" }, picture);
}
