// The Markdown of model cards as elements: headings, paragraphs, lists, tables, code, emphasis and links. HTML in it is text.

import { h } from "./dom.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\[([^\]]*)\]\((\S+?)\)|\\([\\`*_{}[\]()#+\-.!|~$<>])|&(lt|gt|amp|quot|#124);/g;
const ENTITIES = { lt: "<", gt: ">", amp: "&", quot: '"', "#124": "|" };

export function markdown(text) {
  const lines = text.replaceAll("\r", "").split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const take = (test) => {
      const start = i;
      while (i < lines.length && test(lines[i])) i += 1;
      return lines.slice(start, i);
    };
    const heading = /^(#{1,6})\s+(.*)/.exec(line);
    if (heading) {
      blocks.push(h(`h${Math.min(4, heading[1].length)}`, {}, inline(heading[2])));
      i += 1;
    } else if (line.startsWith("---") && i === 0) { // front matter
      i += 1;
      take((one) => one !== "---");
      i += 1;
    } else if (line.startsWith("```")) {
      i += 1;
      blocks.push(code(take((one) => !one.startsWith("```"))));
      i += 1;
    } else if (line.startsWith("    ")) {
      blocks.push(code(take((one) => one.startsWith("    ") || (one === "" && lines[i + 1]?.startsWith("    "))).map((one) => one.slice(4))));
    } else if (line.startsWith("|")) blocks.push(table(take((one) => one.startsWith("|"))));
    else if (/^[-*] /.test(line)) blocks.push(h("ul", {}, take((one) => /^([-*] | {2})/.test(one)).filter((one) => one.trim()).map((one) => h("li", {}, inline(one.replace(/^\s*[-*] /, ""))))));
    else if (line.startsWith(">")) blocks.push(h("blockquote", {}, inline(take((one) => one.startsWith(">")).map((one) => one.replace(/^> ?/, "")).join(" "))));
    else if (!line.trim()) i += 1;
    else {
      const first = i;
      const words = take((one) => one.trim() && (i === first || !/^(#|\||```|[-*] |>)/.test(one)));
      blocks.push(h("p", {}, inline(words.join(" "))));
    }
  }
  return blocks;
}

function code(lines) {
  return h("pre", { tabindex: "0" }, h("code", {}, lines.join("\n").trimEnd()));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const rows = lines.map(cells).filter((row) => !row.every((cell) => /^:?-+:?$/.test(cell)));
  const [head, ...body] = rows;
  const header = head.some(Boolean) ? h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, inline(cell))))) : null;
  const row = (one) => h("tr", {}, one.map((cell, i) => h(i ? "td" : "th", i ? {} : { scope: "row" }, inline(cell))));
  return h("div", { class: "scroll" }, h("table", { class: "facts" }, header, h("tbody", {}, body.map(row))));
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [, , codeText, strong, label, target, escaped, entity] = match;
    if (codeText !== undefined) parts.push(h("code", {}, codeText));
    else if (strong !== undefined) parts.push(h("strong", {}, inline(strong)));
    else if (target !== undefined) parts.push(/^https?:\/\//.test(target) ? h("a", { href: target, rel: "noopener noreferrer", target: "_blank" }, inline(label)) : label);
    else parts.push(escaped ?? ENTITIES[entity]);
  }
  parts.push(text.slice(end));
  return parts;
}
