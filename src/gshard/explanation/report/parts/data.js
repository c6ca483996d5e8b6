// What the report says, and how numbers are written.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);

// An element with properties (``dataset`` and ``aria-...`` too) and children; texts are never read as HTML.
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else if (name === "style") Object.assign(made.style, value);
    else made[name] = value;
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  if (parent) parent.append(made);
  return made;
}

function unit(n, base, names) {
  let i = 0;
  while (Math.abs(Number(n.toPrecision(3))) >= base && i < names.length - 1) { n /= base; i++; }
  return `${i || n % 1 ? Number(n.toPrecision(3)) : n} ${names[i]}`;
}
const bytes = n => unit(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flop = n => unit(n, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
function seconds(s) {
  const [size, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([size]) => Number((s / size).toPrecision(3)) >= 1) || [1e-9, "ns"];
  return s ? `${Number((s / size).toPrecision(3))} ${name}` : "0";
}
const percent = part => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)} %`;
const signed = (n, show) => !n ? "=" : `${n > 0 ? "+" : "−"}${show(Math.abs(n))}`;
const change = n => n > 0 ? "worse" : n < 0 ? "better" : "soft";
