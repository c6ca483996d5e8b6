// A button on each block of code that copies it.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight-python, div.highlight-py, div.highlight-bash")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.onclick = () => navigator.clipboard.writeText(block.querySelector("pre").textContent).then(() => {
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
