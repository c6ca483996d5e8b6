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

verdict();
timelineHead();
draw();
devices();
new ResizeObserver(lanes).observe($("lanes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", lanes);
document.body.dataset.ready = "1";
