"use strict";
// Draws the attention map of every head, enlarges the selected one, and shows the weight under the pointer.
(() => {
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const percent = weight => (100 * weight).toFixed(1) + "%";
  const MARGIN = 8, LETTERS = 16;

  async function unpack({ weights, scale }) {
    const bytes = Uint8Array.from(atob(weights), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const plain = new Uint8Array(await new Response(stream).arrayBuffer());
    const half = plain.length / 2;
    return Float32Array.from({ length: half }, (_, i) => (plain[i] + 256 * plain[half + i]) / scale);
  }

  function paint(canvas, map, rows, columns) {  // one pixel per weight, scaled by the browser
    canvas.width = columns; canvas.height = rows;
    const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
    const [red, green, blue] = rgb(style("--pretrained-0"));
    for (let i = 0; i < rows * columns; i++) image.data.set([red, green, blue, 255 * Math.sqrt(map[i])], 4 * i);
    pen.putImageData(image, 0, 0);
  }

  function rgb(colour) {
    const number = parseInt(colour.slice(1), 16);
    return [number >> 16, (number >> 8) & 255, number & 255];
  }

  function show(section, data, weights) {
    const rows = data.down.length, columns = data.across.length, size = rows * columns;
    const buttons = [...section.querySelectorAll(".grid button")], zoom = section.querySelector(".zoom");
    const big = zoom.querySelector("canvas"), readout = zoom.querySelector(".readout"), read = zoom.querySelector(".read");
    const short = word => word.length > LETTERS ? word.slice(0, LETTERS - 1) + "…" : word;
    let selected = null, at = null, layout = {};

    function mapOf(layer, head) {
      const first = layer * data.heads * size;
      if (head < data.heads) return weights.subarray(first + head * size, first + (head + 1) * size);
      const mean = new Float32Array(size);
      for (let h = 0; h < data.heads; h++)
        for (let i = 0; i < size; i++) mean[i] += weights[first + h * size + i] / data.heads;
      return mean;
    }

    function small() {
      const room = Math.max(44, Math.min(84, Math.floor((section.clientWidth - 110) / (data.heads + 1)) - 8));
      section.querySelector(".grid").style.setProperty("--small", room + "px");
      for (const button of buttons)
        paint(button.firstChild, mapOf(+button.dataset.layer, +button.dataset.head), rows, columns);
    }

    function enlarge() {
      if (!selected) return;
      const pen = big.getContext("2d"), font = "12px " + style("--sans");
      pen.font = font;
      const widest = words => Math.max(...words.map(word => pen.measureText(short(word)).width));
      const left = widest(data.down) + MARGIN, top = widest(data.across) + MARGIN;
      const cell = Math.max(9, Math.min(30, Math.floor((zoom.clientWidth - left - MARGIN) / columns)));
      const wide = left + cell * columns + MARGIN, high = top + cell * rows + MARGIN, dots = devicePixelRatio || 1;
      layout = { left, top, cell };
      big.style.width = wide + "px"; big.style.height = high + "px";
      big.width = wide * dots; big.height = high * dots;
      pen.setTransform(dots, 0, 0, dots, 0, 0);
      const accent = style("--pretrained-0"), map = selected.map;
      for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
        pen.globalAlpha = Math.sqrt(map[i * columns + j]);
        pen.fillStyle = accent;
        pen.fillRect(left + j * cell, top + i * cell, cell, cell);
      }
      pen.globalAlpha = .5; pen.strokeStyle = style("--line"); pen.lineWidth = 1; pen.beginPath();
      for (let i = 0; i <= rows; i++) { pen.moveTo(left, top + i * cell + .5); pen.lineTo(left + columns * cell, top + i * cell + .5); }
      for (let j = 0; j <= columns; j++) { pen.moveTo(left + j * cell + .5, top); pen.lineTo(left + j * cell + .5, top + rows * cell); }
      pen.stroke(); pen.globalAlpha = 1;
      pen.font = font; pen.textBaseline = "middle";
      const ink = style("--ink"), soft = style("--soft"), each = cell >= 11 ? 1 : 2;
      data.down.forEach((word, i) => {
        if (i % each && !(at && at.row === i)) return;
        pen.fillStyle = at && at.row === i ? ink : soft; pen.textAlign = "right";
        pen.fillText(short(word), left - MARGIN / 2, top + (i + .5) * cell);
      });
      data.across.forEach((word, j) => {
        if (j % each && !(at && at.column === j)) return;
        pen.save(); pen.translate(left + (j + .5) * cell, top - MARGIN / 2); pen.rotate(-Math.PI / 2);
        pen.fillStyle = at && at.column === j ? ink : soft; pen.textAlign = "left";
        pen.fillText(short(word), 0, 0); pen.restore();
      });
      if (at) {
        pen.strokeStyle = style("--toward"); pen.lineWidth = 2;
        if (at.column === null) pen.strokeRect(left, top + at.row * cell, columns * cell, cell);
        else pen.strokeRect(left + at.column * cell, top + at.row * cell, cell, cell);
      }
    }

    function describe() {
      readout.textContent = "";
      const row = at ? selected.map.subarray(at.row * columns, (at.row + 1) * columns) : null;
      if (row && at.column !== null) {
        const number = document.createElement("b");
        number.textContent = percent(row[at.column]);
        readout.append(`${data.down[at.row]} (${at.row + 1}) attends to ${data.across[at.column]} (${at.column + 1}): `, number);
      } else if (row) {
        const most = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 4).filter(j => row[j] > 0);
        readout.textContent = `${data.down[at.row]} (${at.row + 1}) attends most to ` +
          most.map(j => `${data.across[j]} ${percent(row[j])}`).join(", ");
      } else readout.textContent = read ? "Point at a square or at a token." : "Point at a square.";
      if (read) shade(row);
    }

    function shade(row) {
      const accent = style("--pretrained-0");
      for (const span of read.children) {
        const mine = +span.dataset.position;
        const weight = row && span.dataset.side === "across" ? Math.sqrt(row[mine]) : 0;
        span.style.background = weight ? `color-mix(in srgb, ${accent} ${Math.round(75 * weight)}%, transparent)` : "";
        span.classList.toggle("query", Boolean(at) && span.dataset.side !== "across" && mine === at.row ||
          Boolean(at) && section.id !== "cross" && mine === at.row);
      }
    }

    function writeText() {  // pointing at a token shows what it attends to
      if (!read) return;
      const sides = section.id === "cross" ? [["across", data.across], ["down", data.down]] : [["across", data.across]];
      for (const [side, words] of sides) {
        words.forEach((word, i) => {
          const span = document.createElement("span");
          span.textContent = word; span.dataset.position = i; span.dataset.side = side;
          if (side === "down" || sides.length === 1) {
            const highlight = () => point({ row: i, column: null });
            span.addEventListener("mouseenter", highlight); span.addEventListener("click", highlight);
          }
          read.append(span, side === "across" && i === words.length - 1 && sides.length > 1 ? document.createElement("br") : " ");
        });
      }
    }

    function point(next) { at = next; enlarge(); describe(); }

    function select(button) {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      const layer = +button.dataset.layer, head = +button.dataset.head;
      selected = { map: mapOf(layer, head) };
      zoom.hidden = false;
      zoom.querySelector("h3").textContent = `Layer ${data.layers[layer]}, ` +
        (head < data.heads ? `head ${data.numbers[head]}` : "mean of its heads");
      big.setAttribute("aria-label", zoom.querySelector("h3").textContent);
      point(at);
    }

    function under(event) {
      const box = big.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left - layout.left) / layout.cell);
      const row = Math.floor((event.clientY - box.top - layout.top) / layout.cell);
      if (row < 0 || row >= rows || column >= columns) return null;
      return { row, column: column < 0 ? null : column };
    }

    big.addEventListener("pointermove", event => point(under(event)));
    big.addEventListener("pointerdown", event => point(under(event)));
    big.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") point(null); });
    for (const button of buttons) button.addEventListener("click", () => select(button));
    const draw = () => { small(); enlarge(); describe(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => selected && draw());
    addEventListener("resize", () => selected && draw());
    section.classList.toggle("long", columns > 32);  // the enlarged map needs the full width
    writeText(); small(); select(buttons[0]);
  }

  const sections = [...document.querySelectorAll("section.attention")];
  const parts = sections.map(section => JSON.parse(section.querySelector("script.maps").textContent));
  Promise.all(parts.map(unpack)).then(all => {
    all.forEach((weights, i) => show(sections[i], parts[i], weights));
    document.documentElement.dataset.ready = "yes";
  });
})();
