// The page: which runs are served, which of them and which view is open (in the address), and the theme.

import { get } from "./api.js";
import { h, replace, shortCount, uniqueId } from "./dom.js";

const VIEWS = {
  predict: () => import("./views/predict.js"),
  generate: () => import("./views/generate.js"),
  fill: () => import("./views/fill.js"),
  embed: () => import("./views/embed.js"),
  explain: () => import("./views/explain.js"),
  file: () => import("./views/file.js"),
  card: () => import("./views/card.js"),
  curves: () => import("./views/curves.js"),
  report: () => import("./views/report.js"),
};
const REPORTS = { run: "Report", comparison: "Comparison" };

let runs = [];
let limits = {};

// Views of a run: those of its task's widgets, then those that many runs have.
function viewsOf(run) {
  const views = run.widgets.map((widget) => ({ id: widget.name, title: widget.title, view: widget.view, widget }));
  if (run.embeds) views.push({ id: "embed", title: "Embed", view: "embed" });
  if (run.explains.length) views.push({ id: "explain", title: "Explain", view: "explain" });
  if (run.predicts) views.push({ id: "file", title: "File", view: "file" });
  views.push({ id: "card", title: "Run card", view: "card" });
  if (run.curves) views.push({ id: "curves", title: "Training", view: "curves" });
  for (const name of run.reports) views.push({ id: `report-${name}`, title: REPORTS[name] ?? name, view: "report", name });
  return views;
}

// The same view of another run; widgets correspond where they ask for the same inputs.
function sameView(view, other) {
  const inputs = (widget) => widget?.inputs.map((field) => field.name).join();
  return viewsOf(other).find((one) => one.view === view.view && (view.widget ? inputs(one.widget) === inputs(view.widget) : one.id === view.id));
}

// The address: #/run/view or #/run/view/other-run
function readAddress() {
  const [name, id, otherName] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const run = runs.find((one) => one.name === name) ?? runs[0];
  const view = viewsOf(run).find((one) => one.id === id) ?? viewsOf(run)[0];
  const other = runs.find((one) => one.name === otherName && one !== run && sameView(view, one));
  return { run, view, other };
}

function address(run, id, other) {
  return `#/${[run.name, id, ...(other ? [other.name] : [])].map(encodeURIComponent).join("/")}`;
}

function drawRuns({ run, view }) {
  const link = (one) => {
    const target = sameView(view, one) ?? viewsOf(one)[0];
    return h("li", {}, h("a", { href: address(one, target.id), "aria-current": one === run ? "page" : null },
      h("span", { class: "name", dir: "auto" }, one.name), h("span", { class: "soft" }, one.title)));
  };
  replace(document.getElementById("runs"), h("h2", { class: "eyebrow" }, runs.length === 1 ? "Run" : "Runs"), h("ul", {}, runs.map(link)));
}

function drawTabs({ run, view, other }) {
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run" });
  for (const one of viewsOf(run)) {
    const selected = one.id === view.id;
    const open = () => { location.hash = address(run, one.id, other && sameView(one, other) ? other : null); };
    list.append(h("button", { type: "button", role: "tab", id: `tab-${one.id}`, "aria-selected": String(selected), "aria-controls": "panel", tabindex: selected ? "0" : "-1", onclick: open }, one.title));
  }
  list.addEventListener("keydown", (event) => {
    const tabs = [...list.children];
    const index = tabs.indexOf(document.activeElement);
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined || index < 0) return;
    event.preventDefault();
    const tab = tabs[(next + tabs.length) % tabs.length];
    focusAfterDrawing = tab.id;
    tab.click();
  });
  return list;
}

let focusAfterDrawing = null;

function drawCompare({ run, view, other }) {
  const others = runs.filter((one) => one !== run && sameView(view, one));
  if (!others.length || view.view === "file" || view.view === "report") return null;
  const id = uniqueId("compare");
  const change = (event) => {
    const chosen = runs.find((one) => one.name === event.target.value);
    focusAfterDrawing = "compare-with";
    location.hash = address(run, view.id, chosen);
  };
  const option = (one) => h("option", { value: one.name, selected: one === other }, one.name);
  return h("div", { class: "compare" }, h("label", { for: id }, "Compare with"),
    h("select", { id, "data-focus": "compare-with", onchange: change }, h("option", { value: "" }, "no other run"), others.map(option)));
}

async function draw() {
  const place = readAddress();
  const { run, view, other } = place;
  document.title = `${run.name} · ${view.title} · Headstock`;
  drawRuns(place);
  const facts = [run.title, run.family, `${shortCount(run.parameters)} parameters`, `reads ${run.length.toLocaleString("en")} tokens`, run.device];
  const panel = h("section", { id: "panel", role: "tabpanel", "aria-labelledby": `tab-${view.id}`, tabindex: "-1" });
  replace(document.getElementById("main"),
    h("header", { class: "run" }, h("div", {}, h("h1", { dir: "auto" }, run.name), h("p", { class: "facts" }, facts.join(" · "))), drawCompare(place)),
    drawTabs(place), panel);
  for (const current of document.querySelectorAll("#runs [aria-current], .tabs [aria-selected=true]")) { // on a phone both lists scroll
    const list = current.closest("ul, .tabs");
    list.scrollLeft = current.offsetLeft - list.offsetLeft - (list.clientWidth - current.offsetWidth) / 2;
  }
  if (focusAfterDrawing) {
    (document.getElementById(focusAfterDrawing) ?? document.querySelector(`[data-focus="${focusAfterDrawing}"]`))?.focus();
    focusAfterDrawing = null;
  }
  const { render } = await VIEWS[view.view]();
  if (!panel.isConnected) return; // another view was opened meanwhile
  const entries = [{ run, ...view }, ...(other ? [{ run: other, ...sameView(view, other) }] : [])];
  panel.append(render(entries, limits));
  document.body.dataset.ready = `${run.name}/${view.id}`;
  performance.mark("interactive");
}

// Theme: the system's, unless the button chose one.

const isDark = () => {
  const chosen = localStorage.getItem("headstock-theme");
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
}

document.getElementById("theme").addEventListener("click", () => {
  localStorage.setItem("headstock-theme", isDark() ? "light" : "dark");
  applyTheme();
  if (document.querySelector("iframe")) draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
applyTheme();

document.addEventListener("keydown", (event) => { // Ctrl+Enter runs the form that has the focus, or the first one
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  const form = document.activeElement?.closest("form") ?? document.querySelector("#panel form");
  form?.requestSubmit();
});

try {
  ({ runs, limits } = await get("/page/runs"));
  addEventListener("hashchange", draw);
  await draw();
} catch (error) {
  replace(document.getElementById("main"), h("p", { class: "callout", role: "alert" }, error.message));
}
