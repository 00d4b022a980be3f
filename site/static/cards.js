// On a phone, a table of four columns or more becomes cards: each cell says its column's name.
// Without a script the page has the plain table.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    if (names.length < 4 || table.closest(".wide, .cell_output")) continue;
    table.classList.add("cards");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, i) => (cell.dataset.column = names[i]));
    }
  }
});
