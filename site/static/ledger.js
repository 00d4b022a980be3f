// The ledger's search and filters. Without a script the page is the plain table with its entries.
const bar = document.getElementById("ledger-filter");
const table = bar.parentElement.querySelector("table");
table.classList.add("verdicts");
const claims = [...table.querySelectorAll("tbody tr")].map((row) => {
  const link = row.querySelector("a");
  const entry = document.getElementById(link.hash.slice(1));
  entry.classList.add("entry");
  const last = [...entry.querySelectorAll("details > p")].at(-1).textContent;
  const [documents, shown] = last.split(/\. (?=Shown )/);
  return {
    row, entry, documents: documents.split("; "), verdict: row.lastElementChild.textContent.trim(),
    lessons: shown.match(/\d\d/g) ?? [], words: `${row.textContent} ${entry.textContent}`.toLowerCase(),
  };
});

function select(name, all, values) {
  return `<label>${name}<select name="${name}"><option value="">${all}</option>${[...new Set(values)].sort()
    .map((value) => `<option>${value}</option>`).join("")}</select></label>`;
}
bar.innerHTML = `<form class="pick"><label>Search<input type="search" name="Search" placeholder="Adam, 24 GB"></label>
  ${select("Verdict", "any", claims.map((claim) => claim.verdict))}
  ${select("Lesson", "any", claims.flatMap((claim) => claim.lessons))}
  ${select("Document", "any", claims.flatMap((claim) => claim.documents))}</form>
  <p class="on-phone">Tap a claim's number to read its entry below.</p><p role="status"></p>`;
bar.hidden = false;

function filter() {
  const form = new FormData(bar.firstElementChild);
  const [words, verdict, lesson, from] = ["Search", "Verdict", "Lesson", "Document"].map((name) => form.get(name));
  let shown = 0;
  for (const claim of claims) {
    const fits = words.toLowerCase().split(/\s+/).every((word) => claim.words.includes(word))
      && (!verdict || claim.verdict === verdict) && (!lesson || claim.lessons.includes(lesson))
      && (!from || claim.documents.includes(from));
    claim.row.hidden = claim.entry.hidden = !fits;
    shown += fits;
  }
  bar.lastElementChild.textContent = `${shown} of ${claims.length} claims`;
}
bar.addEventListener("input", filter);
bar.firstElementChild.addEventListener("submit", (event) => event.preventDefault());
// A link to an entry that is filtered out shows all of them again.
addEventListener("hashchange", () => {
  if (document.querySelector(location.hash)?.hidden) { bar.firstElementChild.reset(); filter(); document.querySelector(location.hash).scrollIntoView(); }
});
filter();
