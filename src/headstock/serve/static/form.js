// The form of a widget: inputs, options, the run button and the copy buttons; and the panes that show its results.

import { ApiError } from "./api.js";
import { h, replace, uniqueId } from "./dom.js";
import { copyButtons } from "./snippets.js";

const kept = new Map(); // what was typed, by the name of the field, so that another run gets the same text

export function remembered(name, fallback) {
  return kept.get(name) ?? fallback;
}

export function remember(name, value) {
  kept.set(name, value);
}

function inputField(field, key) {
  const id = uniqueId(field.name);
  const properties = {
    id, name: field.name, value: remembered(key, field.example), spellcheck: "false", dir: "auto",
    oninput: (event) => remember(key, event.target.value),
  };
  const control = field.kind === "line" ? h("input", { type: "text", ...properties }) : h("textarea", { rows: "4", ...properties });
  return { control, element: h("div", { class: "field" }, h("label", { for: id }, field.label), control) };
}

function optionField(option, key) {
  const id = uniqueId(option.name);
  const numeric = option.kind !== "text";
  const control = h("input", {
    id, name: option.name, type: numeric ? "number" : "text", value: remembered(key, option.default ?? ""),
    min: option.low, max: option.high, step: option.step, title: option.help, placeholder: option.default === null ? "none" : "",
    "aria-description": option.help || null,
    oninput: (event) => remember(key, event.target.value),
  });
  const read = () => (control.value === "" ? undefined : numeric ? Number(control.value) : control.value);
  return { read, element: h("div", { class: "option" }, h("label", { for: id }, option.label), control) };
}

// `start(values, signal)` is called when the form is submitted; `request(values)` is what the copy buttons copy.
export function widgetForm(widget, { start, request }) {
  const inputs = widget.inputs.map((field) => [field.name, inputField(field, `${widget.view} ${field.name}`)]);
  const options = (widget.options ?? []).map((option) => [option.name, optionField(option, `${widget.name} option ${option.name}`)]);
  const values = () => ({
    inputs: Object.fromEntries(inputs.map(([name, { control }]) => [name, control.value])),
    options: Object.fromEntries(options.map(([name, { read }]) => [name, read()]).filter(([, value]) => value !== undefined)),
  });
  const button = h("button", { class: "primary" }, widget.action);
  const stop = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => running?.abort() }, "Stop");
  let running = null;

  async function submit(event) {
    event.preventDefault();
    if (!form.reportValidity()) return;
    running?.abort();
    const mine = new AbortController();
    running = mine;
    form.setAttribute("aria-busy", "true");
    stop.hidden = widget.view !== "generate";
    try {
      await start(values(), mine.signal);
    } finally {
      if (running === mine) {
        form.removeAttribute("aria-busy");
        stop.hidden = true;
      }
    }
  }

  const form = h("form", { class: "card ask", onsubmit: submit },
    inputs.map(([, { element }]) => element),
    options.length ? h("fieldset", { class: "options" }, h("legend", { class: "offscreen" }, "Options"), options.map(([, { element }]) => element)) : null,
    h("div", { class: "actions" }, button, stop, h("kbd", { class: "soft", title: "Runs the form" }, "Ctrl+Enter"), copyButtons(() => request(values()))));
  return { form, inputs: Object.fromEntries(inputs.map(([name, { control }]) => [name, control])) };
}

// One result pane per run; `show(entry, values, signal)` returns what a pane contains.
export function resultPanes(entries, show, placeholder = "The result appears here.") {
  const panes = entries.map((entry) => {
    const content = h("div", { class: "content" }, h("p", { class: "soft" }, placeholder));
    const title = entries.length > 1 ? h("h2", { dir: "auto" }, entry.run.name) : null;
    return { entry, content, element: h("section", { class: "card pane", "aria-live": "polite", "aria-label": `Result of ${entry.run.name}` }, title, content) };
  });
  const run = (values, signal) => Promise.all(panes.map(async ({ entry, content }) => {
    content.classList.add("waiting");
    try {
      const result = await show(entry, values, signal, content);
      if (result) replace(content, result);
    } catch (error) {
      if (error.name !== "AbortError") replace(content, problem(error));
    } finally {
      content.classList.remove("waiting");
    }
  }));
  return { run, element: h("div", { class: entries.length > 1 ? "panes two" : "panes" }, panes.map(({ element }) => element)) };
}

export function problem(error) {
  if (!(error instanceof ApiError)) console.error(error);
  return h("p", { class: "callout", role: "alert" }, error.message);
}

// Form and results beside each other; with two runs, the form above both.
export function workbench(form, panes, entries) {
  return h("div", { class: entries.length > 1 ? "bench stacked" : "bench" }, form, panes);
}
