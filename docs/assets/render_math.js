// Formulas between \\( \\) and \\[ \\], which the Markdown extension arithmatex leaves in elements of class "arithmatex".
const macros = {
  "\\norm": "\\lVert #1\\rVert",
  "\\abs": "\\lvert #1\\rvert",
  "\\E": "\\operatorname{E}",
  "\\R": "\\mathbb{R}",
  "\\Cov": "\\operatorname{Cov}",
  "\\sd": "\\operatorname{sd}",
  "\\Lip": "\\operatorname{Lip}",
};
for (const element of document.querySelectorAll(".arithmatex")) {
  renderMathInElement(element, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
    macros,
  });
  // A full stop or a bracket stays in the line of the short formula before it.
  const after = element.nextSibling;
  const marks = after instanceof Text ? after.data.match(/^[.,;:)]+/) : null;
  if (marks && element.querySelectorAll(".base").length <= 2) {
    const together = document.createElement("span");
    together.className = "formula-and-mark";
    element.replaceWith(together);
    together.append(element, marks[0]);
    after.data = after.data.slice(marks[0].length);
  }
}
