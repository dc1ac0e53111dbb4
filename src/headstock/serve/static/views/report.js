// A report of the run or of its comparison, in a sandboxed frame.

import { login } from "../api.js";
import { h } from "../dom.js";

export function render([{ run, name, title }]) {
  const query = new URLSearchParams({ model: run.name, name, dark: String(document.documentElement.dataset.theme === "dark") });
  const frame = h("iframe", { title: `${title} of ${run.name}`, sandbox: "allow-scripts allow-popups" });
  login().then(() => { frame.src = `/page/report?${query}`; });
  return frame;
}
