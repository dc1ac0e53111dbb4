// Predictions for a table: drop a CSV file, watch the progress, download the result.

import { ApiError, stream } from "../api.js";
import { h, replace } from "../dom.js";
import { problem } from "../form.js";
import { copyButtons } from "../snippets.js";

const PREVIEW_ROWS = 8;

export function render([{ run }], limits) {
  let file = null;
  let running = null;
  const keep = h("input", { type: "checkbox", id: "keep", checked: true });
  const chooser = h("input", { type: "file", id: "table", accept: ".csv,.tsv,.jsonl,.txt", onchange: () => choose(chooser.files[0]) });
  const button = h("button", { class: "primary", disabled: true }, "Predict");
  const cancel = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => running?.abort() }, "Cancel");
  const result = h("div", { class: "content", "aria-live": "polite" }, h("p", { class: "soft" }, "The predictions come back as a CSV file, one line for each row."));
  const address = () => `/v1/files?${new URLSearchParams({ model: run.name, name: file?.name ?? "rows.csv", keep: String(keep.checked) })}`;
  const columns = run.columns.map((name) => h("code", {}, name)).flatMap((name, i) => (i ? [" and ", name] : [name]));
  const drop = h("div", { class: "drop" },
    h("p", {}, h("label", { for: "table" }, "Drop a table here, or choose one")), chooser,
    h("p", { class: "soft note" }, ".csv, .tsv or .jsonl with a header, at most ", `${(limits.max_file / 1e6).toFixed(0)} MB; read from the column${run.columns.length > 1 ? "s" : ""} `, columns));
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    chooser.files = event.dataTransfer.files;
    choose(event.dataTransfer.files[0]);
  });

  function choose(chosen) {
    file = chosen ?? null;
    button.disabled = !file;
  }

  async function predict(event) {
    event.preventDefault();
    if (!file || running) return;
    running = new AbortController();
    button.disabled = true;
    cancel.hidden = false;
    const bar = h("progress", { max: "1" });
    const note = h("p", { class: "soft note" }, "Uploading…");
    replace(result, bar, note);
    const lines = [];
    let total = 0;
    try {
      await stream(address(), { body: await contentOf(file, limits), headers: { "Content-Type": "text/csv" }, signal: running.signal }, (message) => {
        if (message.rows !== undefined) {
          total = message.rows;
          note.textContent = message.waiting ? "Another file is being read; this one is next." : `0 of ${total.toLocaleString("en")} rows`;
          if (message.skipped) result.append(h("p", { class: "soft note" }, `${message.skipped} blank rows are skipped.`));
          return;
        }
        lines.push(message.csv);
        bar.value = message.done / total;
        note.textContent = `${message.done.toLocaleString("en")} of ${total.toLocaleString("en")} rows`;
      });
      showResult(lines, total);
    } catch (error) {
      replace(result, error.name === "AbortError" ? h("p", { class: "soft" }, "Cancelled.") : problem(error));
    } finally {
      running = null;
      button.disabled = false;
      cancel.hidden = true;
    }
  }

  function showResult(lines, total) {
    const url = URL.createObjectURL(new Blob(lines, { type: "text/csv" }));
    const name = `${file.name.replace(/\.\w+$/, "")}-predictions.csv`;
    const [header, ...rows] = parseCsv(lines[0]).slice(0, PREVIEW_ROWS + 1);
    const table = h("div", { class: "scroll preview" }, h("table", { class: "facts" },
      h("thead", {}, h("tr", {}, header.map((cell) => h("th", { scope: "col", dir: "auto" }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", { dir: "auto" }, shorten(cell))))))));
    replace(result, h("p", {}, `${total.toLocaleString("en")} rows are done.`), h("a", { class: "download", href: url, download: name }, "Download the predictions"),
      h("h3", { class: "eyebrow preview-title" }, "The first rows"), table);
  }

  const form = h("form", { class: "card ask", onsubmit: predict }, drop, h("div", { class: "check" }, keep, h("label", { for: "keep" }, "Keep the columns of the file beside the predictions")),
    h("div", { class: "actions" }, button, cancel, copyButtons(() => ({ endpoint: address(), file: file?.name ?? "rows.csv" }))));
  return h("div", { class: "bench" }, form, h("section", { class: "card pane" }, result));
}

async function contentOf(file, limits) {
  if (file.size > limits.max_file) throw new ApiError(`The file is larger than ${limits.max_file.toLocaleString("en")} bytes, which is the limit of this server.`);
  try {
    return await file.arrayBuffer();
  } catch {
    throw new ApiError("The file has changed since it was chosen. Choose it again.");
  }
}

const shorten = (cell) => (cell.length > 90 ? `${cell.slice(0, 89)}…` : cell);

function parseCsv(text) {
  const rows = [];
  let row = [];
  let cell = "";
  let quoted = false;
  for (let i = 0; i < text.length; i += 1) {
    const letter = text[i];
    if (quoted) {
      if (letter !== '"') cell += letter;
      else if (text[i + 1] === '"') { cell += '"'; i += 1; } else quoted = false;
    } else if (letter === '"') quoted = true;
    else if (letter === "," || letter === "\n") {
      row.push(cell);
      cell = "";
      if (letter === "\n") { rows.push(row); row = []; }
    } else cell += letter;
  }
  return rows;
}
