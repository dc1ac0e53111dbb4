// Continues a prompt token by token; every token shows its probability and its alternatives.

import { stream } from "../api.js";
import { h, percent, replace } from "../dom.js";
import { resultPanes, widgetForm, workbench } from "../form.js";

const ALTERNATIVES = 5;

export function render(entries) {
  const { widget, run } = entries[0];
  const bodyOf = (name, { inputs, options }) => ({ model: name, ...inputs, ...options });
  const request = (values) => ({ endpoint: widget.endpoint, body: bodyOf(run.name, values) });

  async function show(entry, values, signal, content) {
    const inspector = h("div", { class: "inspector", "aria-live": "polite" }, h("p", { class: "soft" }, "Point at a token, or move with the arrow keys, to see what else was likely."));
    const output = h("div", { class: "reading tokens", tabindex: "0", role: "group", "aria-label": "Generated text; arrow keys move from token to token", dir: "auto" },
      h("span", { class: "soft prompt" }, values.inputs.prompt));
    const select = (token) => selectToken(output, inspector, token);
    output.addEventListener("keydown", (event) => moveSelection(event, output, select));
    replace(content, output, inspector);
    content.classList.remove("waiting");
    let count = 0;
    let ended = null;
    const started = performance.now();
    const body = JSON.stringify({ ...bodyOf(entry.run.name, values), stream: true, logprobs: ALTERNATIVES });
    try {
      await stream(widget.endpoint, { body, signal }, (event) => {
        const [choice] = event.choices ?? [];
        if (!choice) return;
        for (const token of tokensOf(choice)) {
          output.append(tokenElement(token, select));
          count += 1;
        }
        ended = choice.finish_reason ?? ended;
      });
    } finally {
      const seconds = (performance.now() - started) / 1000;
      const reason = signal.aborted ? "stopped" : { length: "all tokens used", stop: "ended by itself" }[ended] ?? ended ?? "";
      content.append(h("p", { class: "soft note" }, `${count} tokens in ${seconds.toFixed(1)} s · ${reason}`));
    }
    return null;
  }

  const panes = resultPanes(entries, show, "The continuation appears here as it is written.");
  const { form } = widgetForm(widget, { start: panes.run, request });
  return workbench(form, panes.element, entries);
}

// The tokens of one event; the text of an event without log-probabilities counts as one token.
function tokensOf({ text, logprobs }) {
  if (!logprobs?.tokens?.length) return text ? [{ text, probability: null, alternatives: [] }] : [];
  const shown = logprobs.tokens.map((token, i) => ({
    text: token,
    probability: Math.exp(logprobs.token_logprobs[i]),
    alternatives: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([name, value]) => [name, Math.exp(value)]).sort((a, b) => b[1] - a[1]),
  }));
  if (shown.length === 1) shown[0].text = text || ""; // as decoded in its context
  return shown;
}

function tokenElement(token, select) {
  const surprise = token.probability === null ? 0 : Math.min(1, -Math.log(Math.max(token.probability, 1e-6)) / 6);
  const element = h("span", { class: "token", "--surprise": `${Math.round(70 * surprise)}%`, onpointerenter: () => select(element), onclick: () => select(element) }, token.text);
  element.token = token;
  return element;
}

function selectToken(output, inspector, element) {
  for (const old of output.querySelectorAll(".token.current")) old.classList.remove("current");
  element.classList.add("current");
  const { text, probability, alternatives } = element.token;
  if (probability === null) return;
  const row = ([name, value]) => h("tr", { class: name === text ? "selected" : null },
    h("th", { scope: "row", dir: "auto" }, visible(name)), h("td", { class: "bar" }, h("span", { "--value": `${(100 * value).toFixed(2)}%` })), h("td", { class: "n" }, percent(value)));
  const rows = alternatives.some(([name]) => name === text) ? alternatives : [...alternatives, [text, probability]];
  replace(inspector, h("table", { class: "bars small" }, h("caption", {}, "Likely here instead of ", h("b", { dir: "auto" }, visible(text))), h("tbody", {}, rows.map(row))));
}

function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "(nothing)";
}

function moveSelection(event, output, select) {
  const tokens = [...output.querySelectorAll(".token")];
  const index = tokens.findIndex((token) => token.classList.contains("current"));
  const next = { ArrowRight: index + 1, ArrowLeft: index < 0 ? 0 : index - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (next === undefined || !tokens[next]) return;
  event.preventDefault();
  select(tokens[next]);
  tokens[next].scrollIntoView({ block: "nearest" });
}
