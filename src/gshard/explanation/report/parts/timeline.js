// One call, kernel after kernel: loops, what computes, what communicates. Drag or use the arrows to move, wheel or + and - to zoom.
const T = D.timeline, END = Math.max(1e-9, ...T.events.map(e => e[0] + e[1]));
const view = { from: 0, to: END, at: -1 };
const LANES = { loops: 14, compute: 40, network: 72, axis: 104 }, TALL = 26;
const COLOURS = [...Object.keys(BOUNDS), "skip"].map(what => `--${what}`), ROUNDS = COLOURS.length - 1, onLinks = e => e[5] >= 0 || e[2] === 2 || e[2] === 4;

function timelineHead() {
  const button = (text, name, act) => { const made = el("button", { "aria-label": name, title: name }, text); made.onclick = act; return made; };
  const canvas = el("canvas", { id: "canvas", tabIndex: 0, role: "img", "aria-label": "Timeline of one call. Arrow keys go from event to event, Enter chooses its line, + and - zoom." });
  const key = el("span", { className: "key soft" }, ...Object.entries(BOUNDS).map(([what, name]) => el("span", {}, el("i", { className: what }), `mostly ${name}`)));
  $("lanes").replaceChildren(el("div", { className: "lanes-head" }, key, el("span", { className: "now m soft", id: "now" }),
    el("span", {}, button("−", "zoom out", () => zoom(2, 0.5)), " ", button("+", "zoom in", () => zoom(0.5, 0.5)), " ", button("all", "show the whole call", () => { Object.assign(view, { from: 0, to: END }); lanes(); }))), canvas);
  let drag = null;
  const time = event => { const box = canvas.getBoundingClientRect(); return view.from + (view.to - view.from) * (event.clientX - box.left) / box.width; };
  canvas.onpointerdown = event => { drag = { x: event.clientX, from: view.from, moved: false }; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointermove = event => {
    if (!drag) { view.at = eventAt(time(event), event.offsetY); lanes(); return; }
    const by = (drag.x - event.clientX) / canvas.clientWidth * (view.to - view.from);
    if (Math.abs(drag.x - event.clientX) > 3) drag.moved = true;
    if (drag.moved) move(drag.from + by);
  };
  canvas.onpointerup = event => { const still = drag && !drag.moved; drag = null; if (still) { view.at = eventAt(time(event), event.offsetY); chooseEvent(); } };
  canvas.onwheel = event => { if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; event.preventDefault(); const box = canvas.getBoundingClientRect(); zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width); };
  canvas.ondblclick = event => { const box = canvas.getBoundingClientRect(); zoom(0.25, (event.clientX - box.left) / box.width); };
  canvas.onkeydown = event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { view.at = Math.max(0, Math.min(T.events.length - 1, view.at + step)); const e = T.events[view.at]; if (e && (e[0] < view.from || e[0] + e[1] > view.to)) move(e[0] + e[1] / 2 - (view.to - view.from) / 2); lanes(); }
    else if (event.key === "+" || event.key === "=") zoom(0.5, 0.5);
    else if (event.key === "-") zoom(2, 0.5);
    else if (event.key === "Enter") chooseEvent();
    else return;
    event.preventDefault();
  };
}

// The event at a time; of two that run beside each other, the one in the lane at a height.
function eventAt(time, height = 0) {
  const onNetwork = height >= LANES.network, at = T.events.findLastIndex(e => e[0] <= time && time <= e[0] + e[1] && (e[2] === ROUNDS || onLinks(e) === onNetwork));
  if (at >= 0) return at;
  let low = 0, high = T.events.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (T.events[middle][0] <= time) low = middle; else high = middle - 1; }
  return T.events.length ? low : -1;
}

function chooseEvent() {
  const e = T.events[view.at];
  if (!e) return;
  if (e[5] >= 0) chosen.row = e[5];
  const place = T.texts[e[4]];
  if (place) { choose("line", place); shown(place); }
}

function move(from, width = view.to - view.from) {
  view.from = Math.max(0, Math.min(END - width, from));
  view.to = Math.min(END, view.from + width);
  lanes();
}

function zoom(by, at) {
  const width = Math.max(END / 1e6, Math.min(END, (view.to - view.from) * by)), fixed = view.from + (view.to - view.from) * at;
  move(fixed - width * at, width);
}

function lanes() {
  const canvas = $("canvas"), box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  canvas.width = Math.max(1, box.width * scale);
  canvas.height = 118 * scale;
  const g = canvas.getContext("2d"), colours = COLOURS.map(name => style.getPropertyValue(name)), ink = style.getPropertyValue("--ink"), soft = style.getPropertyValue("--soft");
  g.scale(scale, scale);
  g.font = "11px system-ui, sans-serif";
  const x = t => (t - view.from) / (view.to - view.from) * box.width, isLine = e => !chosen.line || T.texts[e[4]] === chosen.line || (e[5] >= 0 && D.collectives[e[5]].emitted === chosen.line);
  const label = (text, left, width, y, colour) => { if (width < 34) return; g.save(); g.beginPath(); g.rect(left, y - 14, width - 4, 20); g.clip(); g.fillStyle = colour; g.fillText(text, left + 5, y); g.restore(); };
  T.loops.forEach(([start, long, depth, name]) => {
    const left = Math.max(0, x(start)), right = Math.min(box.width, x(start + long));
    if (right < 0 || left > box.width || depth > 1) return;
    g.fillStyle = soft; g.globalAlpha = 0.18 + 0.14 * depth; g.fillRect(left, 4 + 15 * depth, right - left - 1, 14); g.globalAlpha = 1;
    label(T.texts[name], left, right - left, 15 + 15 * depth, ink);
  });
  T.events.forEach((e, i) => {
    const left = x(e[0]), width = Math.max(e[1] / (view.to - view.from) * box.width, 0.6);
    if (left > box.width || left + width < 0) return;
    const top = onLinks(e) ? LANES.network : LANES.compute, tall = e[2] === ROUNDS ? LANES.network - LANES.compute + TALL : TALL;
    g.globalAlpha = isLine(e) ? (e[2] === ROUNDS ? 0.35 : 1) : 0.16;
    g.fillStyle = colours[e[2]]; g.fillRect(left, top, width > 3 ? width - 0.7 : width, tall);
    if (i === view.at) { g.globalAlpha = 1; g.strokeStyle = ink; g.lineWidth = 2; g.strokeRect(left, top, Math.max(width, 2), tall); }
    g.globalAlpha = 1;
    label(e[2] === ROUNDS ? T.texts[e[3]] : T.texts[e[3]].split(" ")[0], Math.max(0, left), Math.min(width, box.width - left), top + 17, e[2] === ROUNDS ? ink : "#fff");
  });
  g.fillStyle = soft;
  for (let i = 0; i <= 4; i++) { const t = view.from + (view.to - view.from) * i / 4, text = seconds(t / 1e6); g.fillText(text, Math.min(x(t) + (i ? -g.measureText(text).width / 2 : 4), box.width - g.measureText(text).width - 4), LANES.axis + 10); }
  const e = T.events[view.at];
  $("now").textContent = e ? `${seconds(e[0] / 1e6)}: ${e[6] > 1 ? `${e[6]} kernels, the longest ` : ""}${T.texts[e[3]]}, ${seconds(e[1] / 1e6)}${T.texts[e[4]] ? `, ${T.texts[e[4]]}` : ""}` : "Point at a stretch to see what runs; drag to move, double-click or ctrl + wheel to zoom.";
}
