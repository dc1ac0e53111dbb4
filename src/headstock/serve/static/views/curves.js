// Training curves of metrics.jsonl, one chart per metric; with two runs, both in each chart.

import { get } from "../api.js";
import { decimal, h, replace, svg } from "../dom.js";
import { problem } from "../form.js";

const SIZE = { width: 480, height: 260, left: 52, right: 14, top: 12, bottom: 34 };
const NAMES = { lr: "learning rate", f1: "F1", bleu: "BLEU" };

export function render(entries) {
  const element = h("div", { class: "charts" }, h("p", { class: "soft" }, "Loading…"));
  load(entries, element);
  return element;
}

async function load(entries, element) {
  try {
    const answers = await Promise.all(entries.map(({ run }) => get(`/page/runs/${encodeURIComponent(run.name)}/curves`)));
    const metrics = [...new Set(answers.flatMap(({ charts }) => charts.map(({ metric }) => metric)))];
    const linesOf = (metric) => answers.flatMap(({ charts }, i) => Object.entries(charts.find((chart) => chart.metric === metric)?.lines ?? {})
      .map(([kind, points]) => ({ name: entries.length > 1 ? `${entries[i].run.name}, ${kind}` : kind, run: i, kind, points })));
    replace(element, metrics.length ? metrics.map((metric) => chart(metric, linesOf(metric), entries.length > 1)) : h("p", { class: "soft" }, "This run has no training curves."));
  } catch (error) {
    replace(element, problem(error));
  }
}

function ticks(low, high, count = 5) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const result = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) result.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return result;
}

function chart(metric, lines, compares) {
  const { width, height, left, right, top, bottom } = SIZE;
  const steps = lines.flatMap(({ points }) => points.map(([step]) => step));
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value));
  const logarithmic = metric === "perplexity" && Math.max(...values) > 20 * Math.min(...values);
  const scaled = (value) => (logarithmic ? Math.log10(value) : value);
  const [first, last, low, high] = [Math.min(...steps), Math.max(...steps), Math.min(...values.map(scaled)), Math.max(...values.map(scaled))];
  const x = (step) => left + ((step - first) / (last - first || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((scaled(value) - low) / (high - low || 1)) * (height - top - bottom);
  const name = NAMES[metric] ?? metric;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} by step` });
  const marks = logarithmic ? ticks(low, high, 4).map((power) => 10 ** power) : ticks(low, high);
  for (const value of marks) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }), svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, decimal(logarithmic ? Number(value.toPrecision(2)) : Number(value.toPrecision(6)))));
  }
  for (const step of ticks(first, last, 4)) {
    picture.append(svg("text", { x: x(step), y: height - bottom + 17, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
  picture.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }), svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, "step"));
  const keys = lines.map(({ name: label, run, kind, points }, i) => {
    const colour = `k${compares ? run : kind === "validation" ? 1 : 0}`;
    const dashed = compares && kind === "validation" ? " dashed" : "";
    picture.append(svg("polyline", { class: `line ${colour}${dashed}`, points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
    if (points.length < 30) for (const [step, value] of points) picture.append(svg("circle", { class: `dot ${colour}`, cx: x(step), cy: y(value), r: 2.6 }));
    const sample = svg("svg", { viewBox: "0 0 22 8", class: "key", "aria-hidden": "true" }, svg("line", { class: `line ${colour}${dashed}`, x1: 0, x2: 22, y1: 4, y2: 4 }));
    return { key: h("li", {}, sample, label, h("span", { class: "soft n" }, ` ${decimal(points.at(-1)[1])}`)), points, label, colour, i };
  });
  const readout = h("p", { class: "soft note readout" }, `Last value at step ${last.toLocaleString("en")}.`);
  const cursor = svg("line", { class: "axis", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cursor);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (last - first);
    const near = keys.map(({ points }) => points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best)));
    const at = near.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best))[0];
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    readout.textContent = `Step ${at.toLocaleString("en")}: ${keys.map(({ label }, i) => `${label} ${decimal(near[i][1])}`).join(", ")}`;
  });
  picture.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
  return h("figure", { class: "card" }, h("h2", {}, name[0].toUpperCase() + name.slice(1)), h("ul", { class: "legend" }, keys.map(({ key }) => key)), picture, readout);
}
