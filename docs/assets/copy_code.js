// The copy button takes the attribute data-copy of a block of code: lines after a prompt without it, and lines that a diff adds.
const marks = { gp: /^(>>>|\.\.\.|\$)( |$)/, gi: /^\+/ }; // by the class of the highlighter
for (const [kind, mark] of Object.entries(marks)) {
  for (const code of document.querySelectorAll(`.highlight code:has(.${kind})`)) {
    const lines = code.textContent.split("\n").filter((line) => mark.test(line));
    code.dataset.copy = lines.map((line) => line.replace(mark, "")).join("\n");
  }
}
