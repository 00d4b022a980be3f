// The form names the page that the reader came from: the footer's link ends with #page=NAME.
const from = new URLSearchParams(location.hash.slice(1)).get("page");
if (from) {
  const lines = document.querySelector("div.highlight pre");
  lines.textContent = lines.textContent.replace(/^(Where is it said\?\s+)/, `$1${from}  `);
}
