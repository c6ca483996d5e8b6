// Draws everything that depends on what is chosen.
function draw() {
  chips();
  lanes();
  source();
  collectives();
  exchange();
  difference();
  times();
  memory();
  argumentTable();
  tensors();
}

// What a program does not have has no section.
for (const [id, is] of [["timeline", T.events.length], ["time", D.time.length], ["tensors", D.tensors.some(t => !t.argument)]]) {
  $(id).hidden = !is;
  document.querySelector(`nav a[href='#${id}']`).hidden = !is;
}
$("source-told").textContent = `Bytes that each device sends${D.machine ? " and modelled time" : ""}, at the line that causes them. Select a line to see what it makes.`;
verdict();
timelineHead();
draw();
devices();
new ResizeObserver(lanes).observe($("lanes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", lanes);
document.body.dataset.ready = "1";
