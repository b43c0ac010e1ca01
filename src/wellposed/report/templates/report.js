"use strict";
document.querySelector("#how").hidden = false;
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

const hidden = new Set();
for (const item of all("#variants li")) {
  const number = item.dataset.number;
  const box = make("input", { type: "checkbox", checked: true });
  box.addEventListener("change", () => {
    box.checked ? hidden.delete(number) : hidden.add(number);
    for (const mark of all(`[data-variant="${number}"]`)) mark.toggleAttribute("data-off", !box.checked);
  });
  const label = make("label");
  label.append(box, ...item.childNodes);
  item.append(label);
}

const order = (a, b) => {
  const [x, y] = [a, b].map((cell) => cell.dataset.value ?? cell.textContent.trim());
  if (x === "-" || y === "-") return (x === "-") - (y === "-");
  return [x, y].map(Number).some(Number.isNaN) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
};
for (const table of all("table[data-sort]")) {
  const headings = all("thead th", table);
  headings.forEach((heading, column) => {
    const button = make("button", { type: "button" });
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

const tip = make("div", { id: "tip", hidden: true, role: "status" });
document.body.append(tip);
for (const svg of all("svg[data-hover]")) {
  const { series, points } = JSON.parse(svg.dataset.hover);
  const { width, height } = svg.viewBox.baseVal;
  const rule = document.createElementNS(svg.namespaceURI, "line");
  rule.setAttribute("class", "rule");
  rule.setAttribute("y2", height);
  rule.style.display = "none";
  svg.append(rule);
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const [x, heading, values] = points[at];
    const lines = series
      .map(([number, name], k) => ({ number, name, value: values[k] }))
      .filter(({ number, value }) => value && !hidden.has(String(number)))
      .map(({ number, name, value }) => {
        const swatch = document.querySelector(`#variants [data-number="${number}"] .swatch`);
        return make("div", {}, swatch?.cloneNode() ?? "", `${name}: ${value}`);
      });
    tip.replaceChildren(make("strong", { textContent: heading }), ...lines);
    tip.hidden = false;
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.style.display = "";
    const box = svg.getBoundingClientRect();
    const left = box.left + (x / width) * box.width;
    const place = left + 12 + tip.offsetWidth > innerWidth ? left - 12 - tip.offsetWidth : left + 12;
    tip.style.left = `${Math.max(4, Math.min(place, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(box.top + 8, innerHeight - tip.offsetHeight - 4))}px`;
  };
  const hide = () => {
    tip.hidden = true;
    rule.style.display = "none";
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    show(points.reduce((best, point, k) => (Math.abs(point[0] - x) < Math.abs(points[best][0] - x) ? k : best), 0));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: points.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

addEventListener("beforeprint", () => all("details").forEach((part) => (part.open = true)));
