import { INK, fitted, short } from "./colours.js";
import { Linked } from "./tiles.js";
import { element, tip } from "./elements.js";

// Curves of a report: a panel per list of lines, values on hover, and a legend whose entries switch lines off.

const FRAME = { left: 48, right: 12, top: 8, bottom: 34 };
const DASHES = { "--": [6, 4], ":": [2, 3], "-.": [7, 3, 2, 3] };
const RULE = "#c3cad3", GRID = "#edf0f3", SOFT = "#5b6675";

/** Numbers between two ends for the marks of an axis: those given, else round ones. */
export function ticks([low, high], log, given = []) {
  const inside = given.filter((value) => value >= low && value <= high);
  if (inside.length > 1) return inside;
  const marks = [];
  if (log) {
    const steps = high / low > 300 ? [1] : high / low > 20 ? [1, 3] : [1, 2, 3, 5, 7];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const step of steps) marks.push(step * 10 ** power);
  }
  const fitting = marks.filter((value) => value >= low && value <= high);
  if (fitting.length > 2) return fitting;
  const step = [1, 2, 5, 10].map((s) => s * 10 ** Math.floor(Math.log10((high - low) / 4))).find((s) => (high - low) / s <= 5.5);
  return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, k) => (Math.ceil(low / step) + k) * step);
}

/** The ends of some values on an axis, with room around them. */
function ends(values, log) {
  const into = log ? Math.log : (x) => x;
  const [low, high] = [Math.min(...values), Math.max(...values)].map(into);
  const room = 0.05 * (high - low || 1);
  return [low - room, high + room];
}

export class Curves {
  /** home: an element to fill. chart: what gape.report.charts.Curves gives. */
  constructor(home, chart) {
    Object.assign(this, { chart, hidden: new Set() });
    this.logs = ["x", "y"].map((axis) => chart.log.includes(axis));
    this.canvases = chart.panels.map(({ title }) => element("canvas", { tabindex: 0, role: "img", "aria-label": `${title}: ${chart.y} by ${chart.x}` }));
    const panels = chart.panels.map(({ title }, number) => element("div", { text: title }, [this.canvases[number]]));
    home.append(element("div", { className: "panels" }, panels), this.legend());
    this.linked = new Linked(this.canvases, { most: 16, needsControl: true, draw: (number, zoom) => this.draw(number, zoom), moved: (part) => home.classList.toggle("zoomed", part !== null) });
    for (const [number, canvas] of this.canvases.entries()) {
      canvas.addEventListener("mousemove", (event) => this.hover(event, number));
      canvas.addEventListener("mouseleave", () => { this.near = null; tip(null); this.linked.request(); });
    }
  }

  /** A button per line, in its colour; it shows and hides the line in every panel. */
  legend() {
    const byLabel = new Map(this.chart.panels.flatMap(({ lines }) => lines).map((line) => [line.label, line]));
    return element("div", { className: "legend" }, [...byLabel].map(([label, line]) => {
      const sample = element("canvas");
      const c = fitted(sample, 28, 10);
      stroke(c, line, 2);
      c.moveTo(0, 5);
      c.lineTo(28, 5);
      c.stroke();
      const button = element("button", { type: "button", "aria-pressed": "true" }, [sample, label]);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(label)) this.hidden.add(label);
        button.ariaPressed = String(!this.hidden.has(label));
        this.linked.request();
      });
      return button;
    }));
  }

  shown(panel) { return panel.lines.filter(({ label }) => !this.hidden.has(label)); }

  /** What turns values of x and y into pixels, for the part of a panel that is in sight. Panels of one kind share y. */
  scales(panel, { element, x, y, zoom }) {
    const alike = this.chart.panels.filter(({ kind }) => kind === panel.kind).flatMap(({ lines }) => lines);
    const values = alike.flatMap((line) => [line.y, line.low ?? [], line.high ?? []].flat()).filter((v) => v !== null && (v > 0 || !this.logs[1]));
    const spans = [ends(panel.lines.flatMap((line) => line.x), this.logs[0]), ends(this.chart.share ? [...values, 0, 1] : values, this.logs[1])];
    const box = [element.clientWidth - FRAME.left - FRAME.right, element.clientHeight - FRAME.top - FRAME.bottom];
    const from = [x, 1 - y - 1 / zoom];
    return [0, 1].map((axis) => {
      const [low, high] = spans[axis].map((end, at) => spans[axis][0] + (spans[axis][1] - spans[axis][0]) * (from[axis] + at / zoom));
      const log = this.logs[axis];
      const at = (value) => ((log ? Math.log(value) : value) - low) / (high - low);
      const pixel = axis === 0 ? (value) => FRAME.left + box[0] * at(value) : (value) => FRAME.top + box[1] * (1 - at(value));
      return { pixel, ends: [low, high].map((end) => (log ? Math.exp(end) : end)), log };
    });
  }

  draw(number, zoom) {
    const canvas = zoom.element;
    const panel = this.chart.panels[number];
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const c = fitted(canvas, width, height);
    c.clearRect(0, 0, width, height);
    const scales = this.scales(panel, zoom);
    const [across, up] = scales.map(({ pixel }) => pixel);
    this.axes(c, panel, scales, width, height);
    c.save();
    c.beginPath();
    c.rect(FRAME.left, FRAME.top - 4, width - FRAME.left - FRAME.right + 4, height - FRAME.top - FRAME.bottom + 8);
    c.clip();
    for (const [at, name] of this.chart.marks) this.rule(c, name, across(at), FRAME.top, across(at), height - FRAME.bottom);
    if (this.chart.chance !== null) this.rule(c, "chance", FRAME.left, up(this.chart.chance), width - FRAME.right, up(this.chart.chance));
    for (const line of this.shown(panel)) this.line(c, line, across, up, panel.breaks ?? []);
    c.restore();
  }

  axes(c, panel, [across, up], width, height) {
    Object.assign(c, { font: "11px system-ui, sans-serif", lineWidth: 1, strokeStyle: GRID, fillStyle: SOFT, textAlign: "right", textBaseline: "middle" });
    for (const value of ticks(up.ends, up.log)) {
      const y = Math.round(up.pixel(value)) + 0.5;
      c.strokeRect(FRAME.left, y, width - FRAME.left - FRAME.right, 0);
      c.fillText(short(value).replace("-", "−"), FRAME.left - 6, y);
    }
    c.textAlign = "center";
    const measured = across.log ? [...new Set(panel.lines.flatMap((line) => line.x))].sort((a, b) => a - b) : [];
    let end = -Infinity;
    for (const value of ticks(across.ends, across.log, measured)) {
      const [x, text] = [across.pixel(value), short(value)];
      const half = c.measureText(text).width / 2;
      c.strokeRect(Math.round(x) + 0.5, height - FRAME.bottom, 0, 4);
      if (x - half < end + 6 || x + half > width) continue;
      c.fillText(text, x, height - FRAME.bottom + 12);
      end = x + half;
    }
    c.fillText(this.chart.x, (width + FRAME.left - FRAME.right) / 2, height - 6);
    c.save();
    c.translate(8, (height - FRAME.bottom + FRAME.top) / 2);
    c.rotate(-Math.PI / 2);
    c.fillText(this.chart.y, 0, 0);
    c.restore();
    c.strokeStyle = RULE;
    c.strokeRect(FRAME.left + 0.5, FRAME.top, 0, height - FRAME.top - FRAME.bottom);
    c.strokeRect(FRAME.left, height - FRAME.bottom + 0.5, width - FRAME.left - FRAME.right, 0);
  }

  rule(c, name, x0, y0, x1, y1) {
    c.strokeStyle = RULE;
    c.setLineDash([2, 3]);
    c.beginPath();
    c.moveTo(x0, y0);
    c.lineTo(x1, y1);
    c.stroke();
    c.setLineDash([]);
    Object.assign(c, { fillStyle: SOFT, font: "10px system-ui, sans-serif", textAlign: "left", textBaseline: "bottom" });
    c.fillText(name, x0 + 4, y0 === y1 ? y0 - 2 : y0 + 12);
  }

  line(c, line, across, up, breaks) {
    const { x, y, low, high, colour } = line;
    for (const [at, value] of x.entries()) {
      if (low?.[at] == null || high?.[at] == null) continue;
      Object.assign(c, { fillStyle: colour, globalAlpha: 0.35 });
      const [bottom, top] = [up(low[at]), up(high[at])];
      c.fillRect(across(value) - 1, top, 2, Math.max(bottom - top, 0));
    }
    c.globalAlpha = 1;
    stroke(c, line, this.near?.line.label === line.label ? 3 : 1.8);
    for (const [at, value] of x.entries()) {
      if (at === 0 || breaks.includes(value)) c.moveTo(across(value), up(y[at]));
      else c.lineTo(across(value), up(y[at]));
    }
    c.stroke();
    c.setLineDash([]);
    if (x.length > 24) return;
    c.fillStyle = line.hollow ? "#fff" : colour;
    for (const [at, value] of x.entries()) {
      c.beginPath();
      c.arc(across(value), up(y[at]), 3, 0, 2 * Math.PI);
      c.fill();
      c.stroke();
    }
  }

  /** Say the values of all lines at the nearest place, and draw the nearest line thicker. */
  hover(event, number) {
    const panel = this.chart.panels[number];
    const box = this.canvases[number].getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const [across, up] = this.scales(panel, this.linked.zooms[number]).map(({ pixel }) => pixel);
    const points = this.shown(panel).flatMap((line) => line.x.map((x, at) => ({ line, at, x, apart: Math.hypot(4 * (across(x) - px), up(line.y[at]) - py) })));
    this.near = points.reduce((best, point) => (best && best.apart <= point.apart ? best : point), null);
    this.linked.request();
    if (!this.near) return tip(null);
    const here = points.filter(({ x }) => x === this.near.x).sort((a, b) => b.line.y[b.at] - a.line.y[a.at]);
    const words = here.map(({ line, at }) => `${line === this.near.line ? "▸ " : ""}${line.label}  ${this.value(line, at)}`);
    tip(event, [`${this.chart.x}: ${short(this.near.x)}`, ...words].join("\n"));
  }

  value({ y, low, high }, at) {
    const words = (value) => short(value, 4).replace("-", "−");
    return low?.[at] == null ? words(y[at]) : `${words(y[at])} (${words(low[at])} to ${words(high[at])})`;
  }
}

function stroke(c, { colour, dash }, width) {
  Object.assign(c, { strokeStyle: colour, lineWidth: width, lineJoin: "round" });
  c.setLineDash(DASHES[dash] ?? []);
  c.beginPath();
}
