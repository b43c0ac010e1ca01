// Formulas between \\( \\) and \\[ \\], which the Markdown extension arithmatex leaves in elements of class "arithmatex".
for (const element of document.querySelectorAll(".arithmatex")) {
  renderMathInElement(element, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
  });
}
