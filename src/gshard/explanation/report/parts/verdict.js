// The first screen: what bounds a call, in words, and the totals.
const BOUNDS = { compute: "arithmetic", memory: "memory traffic", network: "bytes on links", launch: "kernel launches", latency: "network latency", host: "transfers to and from the host" };

// Two numbers of bytes; the unit once if it is the same.
function pair(a, b) {
  const [x, y] = [bytes(a), bytes(b)], same = x.split(" ")[1] === y.split(" ")[1];
  return `${same ? x.split(" ")[0] : x} / ${y}`;
}

function verdict() {
  const V = D.verdict, T = D.totals, axes = D.mesh.axes.map(axis => axis.join("=")).join(" ");
  document.title = `${D.name} on ${D.mesh.size} devices: gshard explain`;
  $("title").textContent = `${D.name} on ${D.mesh.size} device${D.mesh.size > 1 ? "s" : ""}`;
  const machine = D.machine && `modelled machine ${D.machine.text}`;
  $("subtitle").textContent = [`mesh ${axes}`, D.program, machine, D.jax && `jax ${D.jax}`].filter(Boolean).join(" · ");
  const shares = el("div", { className: "shares", role: "img", "aria-label": V.headline });
  const key = el("div", { className: "key soft" });
  for (const [what, name] of Object.entries(BOUNDS)) {
    shares.append(el("i", { className: what, style: { width: `${100 * V.shares[what]}%` }, title: `${name} ${percent(V.shares[what])}` }));
    key.append(el("span", {}, el("i", { className: what }), `${name} ${percent(V.shares[what])}`));
  }
  key.append(el("span", { className: "said" }, D.overlap));
  $("verdict").replaceChildren(el("h2", {}, V.headline), ...(D.machine ? [shares, key] : []), el("ul", {}, ...V.sentences.map(text => el("li", {}, ...linked(text)))));
  const [whole, local] = T.arguments;
  const timed = D.machine ? [
    ["time of a call", seconds(T.seconds)], ["of ideal compute", percent(V.share)],
    ["peak memory / memory of a device", pair(T.peak, D.machine.memory), T.peak > D.machine.memory]] : [["peak memory of a device", bytes(T.peak)]];
  const tiles = [
    ["sent by each device", bytes(T.sent)], ...timed,
    whole === null ? ["arguments per device", bytes(local)] : ["arguments: total / per device", pair(whole, local)], ["FLOPs per device", flop(T.flops)]];
  $("tiles").replaceChildren(...tiles.map(([name, value, over]) => el("div", { className: over ? "tile over" : "tile" }, el("b", {}, value), el("span", { className: "soft" }, name))));
  $("notes").replaceChildren(...D.lists.map(([, name, rows]) =>
    el("details", { open: rows.length < 6 }, el("summary", {}, `${name[0].toUpperCase()}${name.slice(1)} (${rows.length})`), el("ul", {}, ...rows.map(row => el("li", {}, row))))));
  if (D.searched) { $("searched").hidden = false; $("searched").querySelector("pre").textContent = D.searched; }
}

// A sentence whose places in the source are links, where the page knows the line.
const KNOWN = new Set(D.files.flatMap(f => f.lines.map(([n]) => `${f.name}:${n}`)));
function linked(text) {
  return text.split(/([\w./-]+\.\w+:\d+)/).map(part => {
    const place = KNOWN.has(part) ? part : [...KNOWN].find(known => known.endsWith(`/${part}`));
    return place && /:\d+$/.test(part) ? placeLink(place, part) : part;
  });
}
