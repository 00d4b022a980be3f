// A button on every block of code that copies it.
function addCopyButtons(within) {
  for (const block of within.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.onclick = async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent).then(
        () => (button.textContent = "Copied"),
        () => (button.textContent = "Not allowed: select it"),
      );
      setTimeout(() => (button.textContent = "Copy"), 2000);
    };
    if (!block.querySelector("button.copy")) block.prepend(button);
  }
}
document.addEventListener("DOMContentLoaded", () => addCopyButtons(document));
