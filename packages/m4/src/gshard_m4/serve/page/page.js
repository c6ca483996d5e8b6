"use strict";

const at = (id) => document.getElementById(id);
const [form, source, from, result, status, left, go, copy, alternatives] =
  ["form", "source", "from", "result", "status", "left", "go", "copy", "alternatives"].map(at);
let limits = { characters: 5000, alternatives: 1 };
let newest = 0;

// Code points, as the server counts them.
const count = () => Array.from(source.value).length;

function say(text, problem = false) {
  status.textContent = text;
  status.classList.toggle("problem", problem);
}

function showLeft() {
  const used = count();
  left.textContent = `${used.toLocaleString("en")} of ${limits.characters.toLocaleString("en")} characters`;
  left.classList.toggle("problem", used > limits.characters);
}

function show(answer) {
  result.replaceChildren(...answer.lines.flatMap((line) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = line.text;
    const notes = [];
    if (line.cut) notes.push("only the beginning of this line was read");
    if (line.unfamiliar) notes.push("the model was not trained on these letters: do not trust this");
    if (line.lost.length) notes.push(`put in: ${line.lost.join(" ")}`);
    if (line.invented.length) notes.push(`taken out: ${line.invented.join(" ")}`);
    if (notes.length) {
      const note = document.createElement("span");
      note.className = "cut";
      note.textContent = `(${notes.join("; ")})`;
      paragraph.append(note);
    }
    const others = line.alternatives.slice(1);
    if (!alternatives.checked || !others.length) return [paragraph];
    const list = document.createElement("ol");
    list.start = 2;
    list.append(...others.map((other) => {
      const item = document.createElement("li");
      item.textContent = other.text;
      return item;
    }));
    return [paragraph, list];
  }));
  copy.hidden = !answer.text;
  copy.onclick = async () => {
    await navigator.clipboard.writeText(answer.text);
    say("Copied.");
  };
}

async function translate() {
  const mine = ++newest;
  const asked = { text: source.value };
  if (from.value) asked.from = from.value;
  if (alternatives.checked) asked.alternatives = limits.alternatives;
  go.disabled = true;
  result.setAttribute("aria-busy", "true");
  say("Translating…");
  const began = performance.now();
  try {
    const reply = await fetch("translate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(asked),
    });
    const answer = await reply.json();
    if (mine !== newest) return;
    if (!reply.ok) {
      say(answer.error, true);
      return;
    }
    show(answer);
    const seconds = `${((performance.now() - began) / 1000).toFixed(1)} s`;
    say(seconds);
  } catch {
    if (mine === newest) say("The server does not answer.", true);
  } finally {
    if (mine === newest) {
      go.disabled = false;
      result.setAttribute("aria-busy", "false");
    }
  }
}

async function start() {
  const known = await (await fetch("languages")).json();
  limits = known;
  at("count").textContent = known.languages.length || "Many";
  alternatives.closest("label").hidden = known.alternatives < 2;
  const named = known.languages.map(({ code, name }) => [name, code]);
  named.sort(([a], [b]) => a.localeCompare(b, "en"));
  from.append(...named.map(([name, code]) => new Option(name, code)));
  showLeft();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  translate();
});
source.addEventListener("input", showLeft);
source.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !go.disabled) form.requestSubmit();
});
start().catch(() => say("The server does not answer.", true));
