{
const violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
const seen = (element) => element.getClientRects().length > 0;
const luminance = (colour) => {
  const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const parse = (text) => text.match(/[0-9.]+/g).map(Number);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const colour = parse(getComputedStyle(each).backgroundColor);
    if (colour[3] !== 0) return colour.slice(0, 3);
  }
  return [255, 255, 255];
};
const contrast = (element) => {
  const style = getComputedStyle(element);
  const ink = parse(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
  const [high, low] = [luminance(ink), luminance(behind(element))].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
};
const texts = () => [...document.body.querySelectorAll("*")].filter((element) =>
  !["SCRIPT", "STYLE"].includes(element.tagName) && seen(element) &&
  [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
const boxes = (element) => [...element.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim()).flatMap((node) => {
  const range = document.createRange();
  range.selectNodeContents(node);
  const clip = element.getBoundingClientRect();
  return [...range.getClientRects()].map((box) => ({ element, text: node.textContent.trim(), left: Math.max(box.left, clip.left), right: Math.min(box.right, clip.right), top: box.top, bottom: box.bottom }));
});
const overprinted = () => {
  const every = texts().filter((e) => !e.closest("#variants, .tall") && Math.abs(onScreen(e).b) < 1e-6).flatMap(boxes).sort((a, b) => a.top - b.top);
  const found = [];
  every.forEach((a, k) => {
    for (const b of every.slice(k + 1)) {
      if (b.top > a.bottom - 2) break;
      if (a.element !== b.element && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1) found.push([a.text, b.text]);
    }
  });
  return found;
};
const results = () => [...document.querySelectorAll("table[data-sort]")].find((t) => t.getAttribute("aria-label").startsWith("Test accuracy"));
const column = () => [...results().tBodies[0].rows].map((row) => row.cells[0].textContent);
const onScreen = (element) => element.getScreenCTM?.() ?? { a: 1, b: 0 };
const size = (element) => parseFloat(getComputedStyle(element).fontSize) * Math.hypot(onScreen(element).a, onScreen(element).b);

setTimeout(() => {
  const found = {};
  found.first = document.querySelector("main table, main figure").getBoundingClientRect().top;
  found.verdict = document.querySelector(".verdict").getBoundingClientRect().top;
  document.querySelectorAll("details").forEach((part) => (part.open = true));
  found.width = [innerWidth, document.documentElement.scrollWidth];
  found.pale = texts().filter((e) => contrast(e) < 4.5).map((e) => [e.tagName, e.textContent, contrast(e)]);
  found.checked = texts().length;
  found.tiny = texts().filter((e) => size(e) < 10.5).map((e) => e.textContent);
  found.overprinted = overprinted();
  found.hinted = [...document.querySelectorAll(".table .scroll")].map((e) => [e.scrollWidth > e.clientWidth + 1, e.parentElement.classList.contains("more")]);
  found.stuck = [...document.querySelectorAll("*")].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.tabIndex < 0 &&
    ["auto", "scroll"].includes(getComputedStyle(e).overflowX)).map((e) => e.outerHTML.slice(0, 80));

  const [means] = [...results().querySelectorAll("thead button")].filter((b) => b.textContent === "test accuracy");
  found.buttons = [...document.querySelectorAll("thead th")].filter((th) => !th.querySelector("button")).length;
  found.order = [column()];
  for (const _ of [1, 2]) {
    means.click();
    found.order.push([means.parentElement.getAttribute("aria-sort"), ...column()]);
  }

  found.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  found.before = [...violations];
  if (location.hash === "#attack") {
    document.body.insertAdjacentHTML("beforeend", '<img src="http://127.0.0.1:9/x"><p onclick="window.hit = 1">x</p>');
    document.body.lastElementChild.click();
  }
  setTimeout(() => {
    found.hit = window.hit ?? 0;
    found.violations = violations;
    parent.postMessage(JSON.stringify(found), "*");
  }, 300);
}, 100);
}
