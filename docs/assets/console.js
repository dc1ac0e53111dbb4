// The copy button of a terminal session copies its commands, without prompts and output.
document.addEventListener("click", (event) => {
  const block = event.target.closest("button")?.closest(".language-console");
  if (!block) return;
  let command = false, previous = "";
  const lines = block.querySelector("code").textContent.split("\n").filter((line) => {
    command = line.startsWith("$ ") || (command && previous.endsWith("\\"));
    previous = line;
    return command;
  });
  setTimeout(() => navigator.clipboard.writeText(lines.map((line) => line.replace(/^\$ /, "")).join("\n")), 50);
});
