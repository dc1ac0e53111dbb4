// Builds elements. Text from the server becomes text nodes only, so that markup in it is shown and never run.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name === "value" || name === "checked" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

let counter = 0;

export function uniqueId(name) {
  counter += 1;
  return `${name}-${counter}`;
}

export function announce(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.add("shown");
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => status.classList.remove("shown"), 2500);
}

export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or not a secure address
    const area = h("textarea", { class: "offscreen", value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce(`Copied as ${what}`);
}

export function percent(value, digits = 1) {
  const number = 100 * value;
  if (number > 0 && number < 0.1) return "<0.1%";
  return `${number.toFixed(digits)}%`;
}

export function decimal(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.0001 || size >= 1e6)) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : value.toFixed(size >= 10 ? 2 : 4).replace(/0+$/, "").replace(/\.$/, "");
}

export function shortCount(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} B`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 1e4 ? `${Math.round(value / 1e3)} k` : value.toLocaleString("en");
}
