// Predictions of a labelled task: the task's own inputs, and the parts by which it displays the result.

import { post } from "../api.js";
import { h, percent } from "../dom.js";
import { problem, resultPanes, widgetForm, workbench } from "../form.js";
import { drawParts, weightedText } from "../parts.js";

export function render(entries) {
  const { widget, run } = entries[0];
  const row = (inputs) => (widget.inputs.length === 1 ? Object.values(inputs)[0] : inputs);
  const request = ({ inputs }) => ({ endpoint: widget.endpoint, body: { model: run.name, input: row(inputs) } });

  async function show(entry, { inputs }, signal) {
    const { parts } = await post("/page/predict", { model: entry.run.name, input: inputs }, { signal });
    return [...drawParts(parts), entry.widget.explains ? explanation(entry, row(inputs)) : null];
  }

  const panes = resultPanes(entries, show);
  const { form } = widgetForm(widget, { start: panes.run, request });
  queueMicrotask(() => form.requestSubmit()); // the page opens with the result of the example
  return workbench(form, panes.element, entries);
}

// The weight of every word for the predicted class, on demand.
function explanation(entry, input) {
  const place = h("div", { class: "part why" });
  const button = h("button", { type: "button", class: "quiet", onclick: explain }, "Which words decide?");
  place.append(button);

  async function explain() {
    button.disabled = true;
    try {
      const facts = await post("/v1/explain", { model: entry.run.name, kind: "prediction", input });
      const words = (text) => facts.words.filter((word) => word.text === text).map(({ begin, end, change }) => ({ begin, end, weight: change }));
      place.replaceChildren(
        h("h3", { class: "eyebrow" }, "Word weights for “", h("bdi", {}, facts.answer), `” (${percent(facts.probability)})`),
        ...facts.texts.map((text, index) => weightedText(text, words(index))),
        h("p", { class: "soft note" }, "Change of the log-odds when a word is left out: ", h("mark", { class: "toward", "--strength": "40%" }, "supports"), " or ", h("mark", { class: "against", "--strength": "40%" }, "opposes"), " the answer."));
    } catch (error) {
      place.replaceChildren(problem(error));
    }
  }
  return place;
}
