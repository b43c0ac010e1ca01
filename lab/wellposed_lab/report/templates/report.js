"use strict";
document.querySelector("#how").hidden = false;
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

const order = (a, b) => {
  const [x, y] = [a, b].map((cell) => cell.dataset.value ?? cell.textContent.trim());
  if (x === "-" || y === "-") return (x === "-") - (y === "-");
  return [x, y].map(Number).some(Number.isNaN) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
};
for (const table of all("table[data-sort]")) {
  const headings = all("thead th", table);
  headings.forEach((heading, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const falls = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const isMissing = (row) => row.cells[column].textContent.trim() === "-";
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const forward = order(a.cells[column], b.cells[column]);
        return falls && !isMissing(a) && !isMissing(b) ? -forward : forward;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

const hint = () => {
  for (const part of all(".table .scroll")) part.parentElement.classList.toggle("more", part.scrollWidth > part.clientWidth + 1);
};
hint();
addEventListener("resize", hint);
for (const part of all("details")) part.addEventListener("toggle", hint);

addEventListener("beforeprint", () => all("details").forEach((part) => (part.open = true)));
