// The current request as a curl command or a Python script; the token stays a variable.

import { hasToken } from "./api.js";
import { copyText, h } from "./dom.js";

const quoteShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function pythonLiteral(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, part]) => `${JSON.stringify(key)}: ${pythonLiteral(part)}`).join(", ")}}`;
  }
  return JSON.stringify(value); // JSON's strings and numbers are Python's
}

export function asCurl({ endpoint, body, file }) {
  const lines = [`curl ${quoteShell(location.origin + endpoint)}`];
  if (hasToken()) lines.push('-H "Authorization: Bearer $HEADSTOCK_TOKEN"');
  if (file) lines.push("-H 'Content-Type: text/csv'", `--data-binary @${quoteShell(file)} -o predictions.csv`);
  else lines.push("-H 'Content-Type: application/json'", `-d ${quoteShell(JSON.stringify(body))}`);
  return lines.join(" \\\n  ") + "\n";
}

const OPENAI = { // by endpoint: the method, its own arguments, and what to print
  "/v1/completions": ["completions", ["model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "n", "stream"], "answer.choices[0].text"],
  "/v1/embeddings": ["embeddings", ["model", "input"], "answer.data[0].embedding[:8]"],
};

export function asPython({ endpoint, body, file }) {
  const token = hasToken() ? 'os.environ["HEADSTOCK_TOKEN"]' : null;
  if (OPENAI[endpoint]) {
    const [method, own, result] = OPENAI[endpoint];
    const known = Object.entries(body).filter(([name]) => own.includes(name));
    const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !own.includes(name)));
    const values = known.map(([name, value]) => `    ${name}=${pythonLiteral(value)},`);
    if (Object.keys(extra).length) values.push(`    extra_body=${pythonLiteral(extra)},`);
    return [
      ...(token ? ["import os", ""] : []),
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${token ?? '"none"'})`,
      `answer = client.${method}.create(`,
      ...values,
      ")",
      `print(${result})`,
      "",
    ].join("\n");
  }
  const url = JSON.stringify(location.origin + endpoint);
  const headers = [`"Content-Type": "${file ? "text/csv" : "application/json"}"`];
  if (token) headers.push(`"Authorization": f"Bearer {${token.replaceAll('"', "'")}}"`);
  const data = file ? `open(${JSON.stringify(file)}, "rb").read()` : `json.dumps(${pythonLiteral(body)}).encode()`;
  const imports = [...(file ? [] : ["json"]), ...(token ? ["os"] : [])].map((name) => `import ${name}`);
  return [
    ...imports,
    "from urllib.request import Request, urlopen",
    "",
    `request = Request(${url}, data=${data}, headers={${headers.join(", ")}})`,
    "with urlopen(request) as response:",
    file ? '    open("predictions.csv", "wb").write(response.read())' : "    print(json.load(response))",
    "",
  ].join("\n");
}

// Two buttons that copy what `current()` returns: the endpoint and the body.
export function copyButtons(current) {
  const button = (what, write) =>
    h("button", { type: "button", class: "quiet", "aria-label": `Copy as ${what}`, onclick: () => copyText(write(current()), what) }, what);
  return h("div", { class: "copies" }, h("span", { "aria-hidden": "true" }, "Copy as"), button("curl", asCurl), button("Python", asPython));
}
