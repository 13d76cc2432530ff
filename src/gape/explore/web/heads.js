import { INK, SCALES, SELECTED, fitted, isDark, short } from "./colours.js";

// Every layer and head as a cell, to pick one from.

/** What heads are coloured by: name, words, whether by its logarithm, and the value of a head. */
export const METRICS = [
  { name: "horizon", label: "mean horizon (1/rate)", unit: " tokens", log: true, gated: true, of: (v, l, h) => v.value("horizon", l, h) },
  { name: "density", label: "landmark density", unit: "", gated: true, of: (v, l, h) => v.value("density", l, v.keyHead(h)) },
  { name: "entropy", label: "entropy", unit: " nats", of: (v, l, h) => v.value("entropy_gated", l, h) },
  { name: "retrieval", label: "retrieval score", unit: "", of: (v, l, h) => v.value("retrieval_gated", l, h) },
];

const MARGIN = 24;

export class Heads {
  constructor(view, state, tip) {
    Object.assign(this, { view, state, tip });
    this.metrics = METRICS.filter((metric) => view.gated || !metric.gated);
    this.canvas = document.getElementById("heads");
    this.canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => tip(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  /** Width and height of a cell. */
  size() {
    const { view } = this;
    const wide = Math.min(64, (this.canvas.clientWidth - MARGIN) / view.layers);
    return [wide, Math.min(34, Math.max(9, Math.min(wide, 160 / view.heads)))];
  }

  draw() {
    const { view, state, canvas } = this;
    const width = canvas.clientWidth;
    if (!width) return;
    const [w, h] = this.size();
    const height = MARGIN - 6 + h * view.heads;
    canvas.style.height = `${height}px`;
    const c = fitted(canvas, width, height);
    c.clearRect(0, 0, width, height);
    const metric = this.metrics.find(({ name }) => name === state.get("metric"));
    // Gates at an identity start never forget: their horizon has no end.
    const value = (l, k) => (metric.log ? Math.log(Math.min(Math.max(metric.of(view, l, k), 1e-9), 1e9)) : metric.of(view, l, k));
    let [low, high] = [Infinity, -Infinity];
    for (let l = 0; l < view.layers; l++) for (let k = 0; k < view.heads; k++) { low = Math.min(low, value(l, k)); high = Math.max(high, value(l, k)); }
    if (!metric.log) low = Math.min(0, low);
    for (let l = 0; l < view.layers; l++) {
      for (let k = 0; k < view.heads; k++) {
        const byte = Math.round(20 + (235 * (value(l, k) - low)) / Math.max(high - low, 1e-9));
        c.fillStyle = SCALES.attention.css[byte];
        c.fillRect(MARGIN + l * w, MARGIN - 6 + k * h, w - 1, h - 1);
        if (w > 40 && h > 18) this.write(c, short(metric.of(view, l, k), 2), MARGIN + (l + 0.5) * w, MARGIN - 6 + (k + 0.5) * h, isDark("attention", byte) ? "#fff" : INK);
      }
    }
    this.axes(c, w, h);
    c.strokeStyle = SELECTED;
    c.lineWidth = 2;
    c.strokeRect(MARGIN + state.get("layer") * w - 0.5, MARGIN - 6 + state.get("head") * h - 0.5, w, h);
  }

  write(c, text, x, y, colour, align = "center") {
    Object.assign(c, { fillStyle: colour, textAlign: align, textBaseline: "middle", font: "11px system-ui, sans-serif" });
    c.fillText(text, x, y);
  }

  axes(c, w, h) {
    const every = (size, least) => Math.ceil(least / size);
    for (let l = 0; l < this.view.layers; l += every(w, 18)) this.write(c, `L${l}`, MARGIN + (l + 0.5) * w, 8, "#5b6675");
    for (let k = 0; k < this.view.heads; k += every(h, 12)) this.write(c, `H${k}`, MARGIN - 5, MARGIN - 6 + (k + 0.5) * h, "#5b6675", "right");
  }

  /** The layer and head under an event, or null. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [w, h] = this.size();
    const layer = Math.floor((event.clientX - box.left - MARGIN) / w);
    const head = Math.floor((event.clientY - box.top - MARGIN + 6) / h);
    return layer >= 0 && layer < this.view.layers && head >= 0 && head < this.view.heads ? { layer, head } : null;
  }

  choose(place) { if (place) this.state.set(place); }

  hover(event) {
    const place = this.at(event);
    this.tip(event, place && `Layer ${place.layer}, head ${place.head}\n${this.values(place.layer, place.head).join("\n")}`);
  }

  /** Every metric of a head in words. */
  values(layer, head) {
    return this.metrics.map(({ label, unit, of }) => `${label} ${short(of(this.view, layer, head))}${unit}`);
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in moves)) return;
    const [layer, head] = [this.state.get("layer") + moves[event.key][0], this.state.get("head") + moves[event.key][1]];
    if (layer >= 0 && layer < this.view.layers && head >= 0 && head < this.view.heads) this.state.set({ layer, head });
    event.preventDefault();
    event.stopPropagation();
  }
}
