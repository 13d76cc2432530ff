import { paintScale, short } from "./colours.js";
import { PanZoom } from "./panzoom.js";
import { element, tip } from "./elements.js";
import { Linked, Sheet, painted } from "./tiles.js";
import { Curves } from "./curves.js";

// Figures of a report: their numbers drawn as curves or as the explorer's maps; pictures where there is no chart. All of
// them zoom: Ctrl and the wheel, two fingers, a double click or keys.

/** Maps of a report, a row per model, that zoom together. */
class ChartMaps {
  constructor(home, chart) {
    this.chart = chart;
    this.maps = chart.rows.flatMap(({ label, cells, heads }, row) => heads.map((text, head) => {
      const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
      return { row, label, head, cells, bytes, image: painted(bytes, cells, cells) };
    }));
    const canvases = this.maps.map(({ label, head }) => element("canvas", { tabindex: 0, role: "img", "aria-label": `${label}, head ${head}: ${chart.what}` }));
    const rows = chart.rows.map(({ label, heads }, row) => {
      const grid = element("div", { className: "maps" }, [element("b", { text: label }), ...canvases.filter((_, number) => this.maps[number].row === row)]);
      grid.style.setProperty("--heads", heads.length);
      return grid;
    });
    home.append(chart.title, ...rows, this.scale());
    const draw = (number, zoom) => this.draw(number, zoom);
    const moved = (part) => home.classList.toggle("zoomed", part !== null);
    this.linked = new Linked(canvases, { most: 16, needsControl: true, draw, moved });
    for (const [number, canvas] of canvases.entries()) {
      canvas.addEventListener("mousemove", (event) => tip(event, this.words(event, number)));
      canvas.addEventListener("mouseleave", () => tip(null));
    }
  }

  scale() {
    const { what, least, top } = this.chart;
    const canvas = element("canvas", { width: 120, height: 10 });
    paintScale(canvas, "attention");
    return element("div", { className: "legend" }, [canvas, `${what}, ${least ?? 0} to ${short(top)}${least ? ", by its logarithm" : ""}`]);
  }

  draw(number, zoom) {
    const { image, cells } = this.maps[number];
    const sheet = new Sheet(zoom.element, cells, zoom);
    sheet.put(image, 0, 0, cells);
    sheet.hideFuture();
  }

  words(event, number) {
    const { label, head, cells, bytes } = this.maps[number];
    const { least, top, what, length } = this.chart;
    const zoom = this.linked.zooms[number];
    const [x, y] = zoom.inside(...zoom.place(event));
    const [key, query] = [x, y].map((part) => Math.min(Math.floor(part * cells), cells - 1));
    if (key > query) return "";
    const byte = bytes[query * cells + key];
    const value = least === null ? (top * byte) / 255 : byte === 0 ? 0 : least ** (1 - byte / 255);
    const tokens = (place) => `${Math.floor((place * length) / cells)}–${Math.floor(((place + 1) * length) / cells) - 1}`;
    return `${label}, head ${head}\nqueries ${tokens(query)}, keys ${tokens(key)}\n${what}: ${least !== null && byte === 0 ? `below ${least}` : short(value, 2)}`;
  }
}

/** A picture that zooms. */
class Picture {
  constructor(frame) {
    const image = frame.querySelector("img");
    const changed = ({ x, y, zoom }) => {
      image.style.transform = `scale(${zoom}) translate(${-100 * x}%, ${-100 * y}%)`;
      frame.classList.toggle("zoomed", zoom > 1);
    };
    const zoom = new PanZoom(frame, { most: 16, needsControl: true, changed });
    this.linked = { show: () => zoom.show(0, 0, 1) };
  }
}

for (const figure of document.querySelectorAll("figure")) {
  const [frame, numbers] = [figure.querySelector(".zoom"), figure.querySelector("script")];
  let shown = null;
  if (numbers) {
    const home = element("div");
    frame.replaceWith(home);
    const chart = JSON.parse(numbers.textContent);
    shown = new (chart.kind === "maps" ? ChartMaps : Curves)(home, chart);
  } else {
    shown = new Picture(frame);
  }
  figure.querySelector("figcaption button").addEventListener("click", () => shown.linked.show(null));
}
document.documentElement.dataset.ready = "yes";
