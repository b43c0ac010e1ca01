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
}
