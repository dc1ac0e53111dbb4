// Fills masks: the likeliest words of each; a click puts a word into the text.

import { post } from "../api.js";
import { h, percent, replace } from "../dom.js";
import { remember, resultPanes, widgetForm, workbench } from "../form.js";

const MASK = "[MASK]";

export function render(entries) {
  const { widget, run } = entries[0];
  const bodyOf = (name, { inputs, options }) => ({ model: name, ...inputs, ...options });
  const request = (values) => ({ endpoint: widget.endpoint, body: bodyOf(run.name, values) });

  async function show(entry, values, signal) {
    const { texts: [{ text, fills }] } = await post(widget.endpoint, bodyOf(entry.run.name, values), { signal });
    return drawFills(text, fills, insert);
  }

  function insert(text) {
    inputs.input.value = text;
    remember(`${widget.view} input`, text);
    if (text.includes(MASK)) form.requestSubmit();
  }

  const panes = resultPanes(entries, show);
  const { form, inputs } = widgetForm(widget, { start: panes.run, request });
  queueMicrotask(() => form.requestSubmit());
  return workbench(form, panes.element, entries);
}

function drawFills(text, fills, insert) {
  const pieces = text.split(MASK);
  const chosen = fills.map((candidates) => candidates[0]?.token ?? MASK);
  const preview = h("p", { class: "reading", dir: "auto" });
  const drawPreview = () => replace(preview, pieces.flatMap((piece, i) => (i ? [h("mark", { class: "found" }, chosen[i - 1]), piece] : [piece])));
  drawPreview();

  function choose(mask, word) {
    chosen[mask] = word;
    drawPreview();
    insert(pieces.reduce((before, piece, i) => before + (i - 1 === mask ? word : MASK) + piece));
  }

  const candidate = (mask) => ({ token, probability }) => h("li", {}, h("button", { type: "button", class: "candidate", "--value": percent(probability, 3).replace("<", ""), title: "Put this word into the text", onclick: () => choose(mask, token) },
    h("span", { dir: "auto" }, token), h("span", { class: "n" }, percent(probability))));
  const columns = fills.map((candidates, mask) => h("section", { class: "mask" },
    h("h3", { class: "eyebrow" }, fills.length > 1 ? `Mask ${mask + 1}` : "Candidates"), h("ol", {}, candidates.map(candidate(mask)))));
  return [preview, h("div", { class: "masks" }, columns), h("p", { class: "soft note" }, "Select a word to put it into the text; the other masks are filled again.")];
}
