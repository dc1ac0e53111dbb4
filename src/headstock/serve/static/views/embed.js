// Embeddings of pasted lines: the lines nearest to a query, and a map of all of them.

import { post } from "../api.js";
import { h, svg } from "../dom.js";
import { resultPanes, widgetForm, workbench } from "../form.js";

const EXAMPLE = [
  "The acting was superb.", "A brilliant performance by the whole cast.", "The plot makes no sense.", "I could not follow the story.",
  "Beautiful photography and music.", "The soundtrack is wonderful.", "A complete waste of time.", "I walked out after an hour.",
].join("\n");
const WIDTH = 460;
const HEIGHTS = [180, 420]; // as the shape of the map needs, between these
const MARGIN = 24;
const NEAREST = 10;

export function render(entries, limits) {
  const widget = {
    name: "embed", view: "embed", action: "Embed",
    inputs: [
      { name: "lines", label: `Lines, one text each (2 to ${limits.max_map_lines})`, kind: "text", example: EXAMPLE },
      { name: "query", label: "Query", kind: "line", example: "Great actors." },
    ],
  };
  const linesOf = ({ inputs }) => inputs.lines.split("\n").map((line) => line.trim()).filter(Boolean);
  const request = (values) => ({ endpoint: "/v1/embeddings", body: { model: entries[0].run.name, input: [...linesOf(values), values.inputs.query].filter(Boolean) } });

  async function show(entry, values, signal) {
    const lines = linesOf(values);
    const { points, similarities } = await post("/page/map", { model: entry.run.name, input: lines, query: values.inputs.query }, { signal });
    return drawMap(lines, points, similarities, values.inputs.query.trim());
  }

  const panes = resultPanes(entries, show);
  const { form, inputs } = widgetForm(widget, { start: panes.run, request });
  inputs.lines.rows = 9;
  queueMicrotask(() => form.requestSubmit());
  return workbench(form, panes.element, entries);
}

function drawMap(lines, points, similarities, query) {
  const order = lines.map((_, i) => i);
  if (similarities) order.sort((a, b) => similarities[b] - similarities[a]);
  const near = new Set(similarities ? order.slice(0, Math.min(3, Math.ceil(lines.length / 3))) : []);
  const places = [];
  const items = [];
  const mark = (index, on) => {
    for (const element of [places[index], items[index]]) element?.classList.toggle("current", on);
  };
  const hover = (index) => ({ onpointerenter: () => mark(index, true), onpointerleave: () => mark(index, false), onfocus: () => mark(index, true), onblur: () => mark(index, false) });
  const { height, place: locate } = fitted(points);
  const centers = points.map(locate);
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "Map of the lines by the first two principal components of their embeddings" });
  const labels = [];
  centers.forEach(([left, top], index) => {
    const isQuery = index >= lines.length;
    const text = isQuery ? query : lines[index];
    const label = labelAt(text, left, top, labels, centers, height);
    const place = svg("g", { class: "place", tabindex: "0", ...hover(index) }, svg("title", {}, text),
      svg("circle", { class: `point${isQuery ? " query" : near.has(index) ? " near" : ""}`, cx: left, cy: top, r: isQuery ? 7 : 5.5 }), label);
    places.push(place);
    chart.append(place);
  });
  order.forEach((index) => {
    items[index] = h("li", hover(index), h("span", { dir: "auto" }, lines[index]), h("span", { class: "n soft" }, similarities ? similarities[index].toFixed(3) : ""));
  });
  const ranking = h("ol", { class: "ranking" }, order.slice(0, NEAREST).map((index) => items[index]));
  return [
    similarities ? [h("h3", { class: "eyebrow" }, "Nearest to “", h("bdi", {}, query), "” (cosine)"), ranking] : null,
    h("h3", { class: "eyebrow map-title" }, "Map"), chart,
    h("p", { class: "soft note" }, "First two principal components. The large point is the query; the nearest lines are orange."),
  ].flat();
}

// The same scale in both directions, and a picture as high as the points need.
function fitted(points) {
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const room = HEIGHTS[1] - 2 * MARGIN;
  const scale = Math.min((WIDTH - 2 * MARGIN) / (right - left || 1), room / (high - low || 1));
  const height = Math.max(HEIGHTS[0], (high - low) * scale + 2 * MARGIN);
  const place = ([x, y]) => [WIDTH / 2 + (x - (left + right) / 2) * scale, height / 2 - (y - (low + high) / 2) * scale];
  return { height, place };
}

// A short label beside, above or below a point, left out where it would cover a point or another label.
function labelAt(text, left, top, labels, centers, height) {
  const short = text.length > 30 ? `${text.slice(0, 29)}…` : text;
  const width = short.length * 5.9;
  const choices = [[left + 10, top + 4, "start"], [left - 10 - width, top + 4, "start"], [left - width / 2, top - 11, "start"], [left - width / 2, top + 19, "start"]];
  for (const [x, y, anchor] of choices) {
    const box = { x1: x, x2: x + width, y1: y - 10, y2: y + 3 };
    const inside = box.x1 >= 0 && box.x2 <= WIDTH && box.y1 >= 0 && box.y2 <= height;
    const clear = labels.every((other) => box.x2 < other.x1 || box.x1 > other.x2 || box.y2 < other.y1 || box.y1 > other.y2)
      && centers.every(([cx, cy]) => cx + 7 < box.x1 || cx - 7 > box.x2 || cy + 6 < box.y1 || cy - 6 > box.y2);
    if (inside && clear) {
      labels.push(box);
      return svg("text", { x, y, "text-anchor": anchor }, short);
    }
  }
  return null;
}
