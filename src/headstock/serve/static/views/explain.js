// The explain views: the page that `headstock explain ... --out` writes, in a sandboxed frame.

import { login } from "../api.js";
import { h, replace, uniqueId } from "../dom.js";
import { remember, remembered } from "../form.js";
import { copyButtons } from "../snippets.js";

export function render(entries) {
  const { run } = entries[0];
  const kinds = run.explains.filter((kind) => entries.every((entry) => entry.run.explains.some(({ name }) => name === kind.name)));
  const select = h("select", { id: uniqueId("kind") }, kinds.map(({ name, title }) => h("option", { value: name, selected: name === remembered("explain kind", "") }, title)));
  const fields = run.explain_inputs.map((field) => {
    const id = uniqueId(field.name);
    const key = `explain ${field.name}`;
    const control = h("textarea", { id, rows: "2", value: remembered(key, field.example), spellcheck: "false", dir: "auto", oninput: () => remember(key, control.value) });
    return { field, control, element: h("div", { class: "field" }, h("label", { for: id }, field.label), control) };
  });
  const needsText = () => kinds.find(({ name }) => name === select.value)?.text ?? true;
  const input = () => (fields.length === 1 ? fields[0].control.value : Object.fromEntries(fields.map(({ field, control }) => [field.name, control.value])));
  const bodyOf = (name) => ({ model: name, kind: select.value, ...(needsText() ? { input: input() } : {}) });
  const inputs = h("div", { class: "texts" }, fields.map(({ element }) => element));
  const frames = h("div", { class: entries.length > 1 ? "panes two frames" : "frames" });

  async function show(event) {
    event?.preventDefault();
    remember("explain kind", select.value);
    inputs.hidden = !needsText();
    await login();
    replace(frames, entries.map((entry) => frame(entry.run, bodyOf(entry.run.name))));
  }

  const form = h("form", { class: "card ask", onsubmit: show },
    h("div", { class: "explain-form" }, h("div", { class: "field" }, h("label", { for: select.id }, "View"), select), inputs),
    h("div", { class: "actions" }, h("button", { class: "primary" }, "Explain"), h("kbd", { class: "soft" }, "Ctrl+Enter"), copyButtons(() => ({ endpoint: "/v1/explain", body: bodyOf(run.name) }))));
  select.addEventListener("change", show);
  queueMicrotask(show);
  return h("div", { class: "stack" }, form, frames);
}

function frame(run, body) {
  const query = new URLSearchParams({ model: run.name, kind: body.kind, input: JSON.stringify(body.input ?? null), dark: String(document.documentElement.dataset.theme === "dark") });
  return h("iframe", { title: `Explanation by ${run.name}`, sandbox: "allow-scripts", src: `/page/explain?${query}` });
}
