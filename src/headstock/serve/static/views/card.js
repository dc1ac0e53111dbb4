// The run card: the model card (Markdown), the metrics with their intervals, and the settings.

import { get } from "../api.js";
import { decimal, h, replace } from "../dom.js";
import { problem } from "../form.js";
import { markdown } from "../markdown.js";

export function render(entries) {
  const panes = entries.map(({ run }) => {
    const element = h("div", { class: "stack" }, h("p", { class: "soft" }, "Loading…"));
    load(run, element, entries.length > 1);
    return element;
  });
  return h("div", { class: entries.length > 1 ? "columns even" : "columns" }, panes);
}

async function load(run, element, titled) {
  try {
    const { card, settings, metrics, measured_on: measuredOn } = await get(`/page/runs/${encodeURIComponent(run.name)}/card`);
    const title = titled ? h("h2", { dir: "auto" }, run.name) : null;
    const text = h("article", { class: "card markdown" }, card ? markdown(card) : h("p", { class: "soft" }, "This run has no model card."));
    const facts = h("div", { class: "stack" }, metrics.length ? h("section", { class: "card" }, h("h2", {}, "Metrics"), h("p", { class: "soft note" }, `On ${measuredOn}; 95% intervals.`), metricsTable(metrics)) : null,
      h("section", { class: "card" }, h("h2", {}, "Settings"), settingsTable(settings)));
    replace(element, title, titled ? [facts, text] : h("div", { class: "columns two" }, text, facts));
  } catch (error) {
    replace(element, problem(error));
  }
}

function metricsTable(metrics) {
  const row = ({ name, value, interval }) => h("tr", {}, h("th", { scope: "row" }, name.replaceAll("_", " ")), h("td", { class: "n" }, decimal(value)),
    h("td", { class: "soft" }, interval ? `${decimal(interval[0])} to ${decimal(interval[1])}` : ""));
  return h("div", { class: "scroll" }, h("table", { class: "facts" }, h("tbody", {}, metrics.map(row))));
}

function settingsTable(settings) {
  const row = ([name, value]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", { dir: "auto" }, value));
  const [shown, folded] = [settings.slice(0, 12), settings.slice(12)];
  const table = (rows) => h("div", { class: "scroll" }, h("table", { class: "facts" }, h("tbody", {}, rows.map(row))));
  return h("div", {}, table(shown), folded.length ? h("details", {}, h("summary", {}, `${folded.length} more`), table(folded)) : null);
}
