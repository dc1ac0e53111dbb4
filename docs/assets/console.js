// The copy button of commands copies them alone: without prompts, output and comments, which zsh does not accept.
document.addEventListener("click", (event) => {
  const block = event.target.closest("button")?.closest(".language-console, .language-bash");
  if (!block) return;
  const session = block.matches(".language-console");
  let command = false, previous = "";
  const lines = block.querySelector("code").textContent.trimEnd().split("\n").filter((line) => {
    command = (session ? line.startsWith("$ ") : !line.startsWith("#")) || (command && previous.endsWith("\\"));
    previous = line;
    return command;
  });
  setTimeout(() => navigator.clipboard.writeText(lines.map((line) => line.replace(/^\$ /, "")).join("\n")), 50);
});
