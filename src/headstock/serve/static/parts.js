// Draws the parts of a result; a task says which (tasks/widgets.py), and the page knows only these.

import { decimal, h, percent } from "./dom.js";

const PARTS = { bars, text, spans, highlight, scale, table, heatmap };
const MAX_BARS = 20;

export function drawParts(parts) {
  return parts.map((part) => PARTS[part.kind]?.(part) ?? null);
}

function bars({ bars: rows, selected }) {
  const sorted = rows.length > 6 ? [...rows].sort((a, b) => b[1] - a[1]).slice(0, MAX_BARS) : rows;
  const row = ([label, value]) => h("tr", { class: selected.includes(label) ? "selected" : null },
    h("th", { scope: "row", dir: "auto", title: label }, label),
    h("td", { class: "bar" }, h("span", { "--value": percent(value, 3).replace("<", "") })),
    h("td", { class: "n" }, percent(value)));
  const first = selected.length ? h("p", { class: "answer", dir: "auto" }, selected.join(", ")) : null;
  const rest = rows.length > sorted.length ? h("p", { class: "soft" }, `and ${rows.length - sorted.length} less likely ones`) : null;
  return h("div", { class: "part" }, first, h("table", { class: "bars" }, h("caption", { class: "offscreen" }, "Probability of each label"), h("tbody", {}, sorted.map(row))), rest);
}

function text({ text: content, title }) {
  return h("div", { class: "part" }, title ? h("h3", { class: "eyebrow" }, title) : null, h("p", { class: "reading", dir: "auto" }, content));
}

function spans({ text: content, spans: marks }) {
  const reading = h("p", { class: "reading tagged", dir: "auto" });
  const legend = new Map();
  let end = 0;
  for (const span of marks) {
    reading.append(content.slice(end, span.start));
    const probability = span.probability === null ? "" : ` ${percent(span.probability)}`;
    reading.append(h("mark", { class: `tag c${span.colour}`, title: `${span.label}${probability}` },
      content.slice(span.start, span.end), h("small", {}, span.label)));
    legend.set(span.label, (legend.get(span.label) ?? [span.colour, 0]));
    legend.get(span.label)[1] += 1;
    end = span.end;
  }
  reading.append(content.slice(end));
  const entries = [...legend].sort(([a], [b]) => a.localeCompare(b)).map(([label, [colour, count]]) =>
    h("li", {}, h("i", { class: `c${colour}` }), label, h("span", { class: "soft" }, ` ${count}`)));
  const list = entries.length ? h("ul", { class: "legend", "aria-label": "Legend" }, entries) : h("p", { class: "soft" }, "Nothing is labelled.");
  return h("div", { class: "part" }, reading, list);
}

function highlight({ text: content, start, end, answer, probability }) {
  const head = h("p", { class: "answer", dir: "auto" }, answer, probability === null ? null : h("span", { class: "soft" }, ` ${percent(probability)}`));
  const body = start === null ? [content] : [content.slice(0, start), h("mark", { class: "found" }, content.slice(start, end)), content.slice(end)];
  return h("div", { class: "part" }, head, h("p", { class: "reading", dir: "auto" }, body));
}

function scale({ value, low, high, label }) {
  const head = h("p", { class: "answer" }, decimal(value), label ? h("span", { class: "soft" }, ` ${label}`) : null);
  if (low === null || high === null || high <= low) return h("div", { class: "part" }, head);
  const share = Math.min(1, Math.max(0, (value - low) / (high - low)));
  return h("div", { class: "part" }, head, h("div", { class: "scale", role: "img", "aria-label": `${decimal(value)} on a scale from ${decimal(low)} to ${decimal(high)}` },
    h("span", { class: "track" }, h("i", { "--value": `${100 * share}%` })), h("span", {}, decimal(low)), h("span", {}, decimal(high))));
}

function table({ rows }) {
  return h("div", { class: "part scroll" }, h("table", { class: "facts" }, h("tbody", {}, rows.map(([name, value]) =>
    h("tr", {}, h("th", { scope: "row", dir: "auto" }, name), h("td", { dir: "auto" }, value))))));
}

function heatmap({ title, rows, columns, values }) {
  const cell = (value, i, j) => h("td", { "--value": `${Math.round(100 * Math.sqrt(value))}%`, title: `${rows[i]} ← ${columns[j]}: ${percent(value)}` });
  return h("figure", { class: "part" }, h("figcaption", { class: "eyebrow" }, title), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
    h("table", { class: "heatmap" },
      h("thead", {}, h("tr", {}, h("td"), columns.map((name) => h("th", { scope: "col" }, h("span", { dir: "auto" }, name))))),
      h("tbody", {}, rows.map((name, i) => h("tr", {}, h("th", { scope: "row", dir: "auto" }, name), values[i].map((value, j) => cell(value, i, j))))))));
}

// A text whose words are tinted by their weights: orange supports the answer, blue opposes it.
export function weightedText(content, words) {
  const largest = Math.max(...words.map(({ weight }) => Math.abs(weight)), 1e-9);
  const reading = h("p", { class: "reading weighted", dir: "auto" });
  let end = 0;
  for (const { begin, end: stop, weight } of words) {
    if (begin < end) continue;
    reading.append(content.slice(end, begin));
    const strength = Math.round(75 * Math.abs(weight) / largest);
    const sign = weight >= 0 ? "toward" : "against";
    reading.append(strength < 4 ? content.slice(begin, stop) : h("mark", { class: sign, "--strength": `${strength}%`, title: `${weight >= 0 ? "+" : "−"}${Math.abs(weight).toFixed(3)}` }, content.slice(begin, stop)));
    end = stop;
  }
  reading.append(content.slice(end));
  return reading;
}
