import { ACCENT, FAINT, INK, SCALES, SELECTED, fitted, isDark, short } from "./colours.js";

// The text as tokens on a canvas of which only the lines in sight are drawn, and the whole text as a strip above it.

const FONT = '15px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const LINE = 30, BOX = 21, GAP = 1, PAD = 3;

/** The colour of a token: a scale and a byte of it. */
export function tokenColour(view, state, rows, i) {
  const [colour, layer, head] = [state.get("colour"), state.get("layer"), state.get("head")];
  if (colour === "attention") return ["attention", rows.gated ? rows.gated.bytes[i] : 0];
  if (!view.gated) return ["neutral", 0];
  return colour === "gate" ? ["gate", view.along("gate", layer, head)[i]] : ["landmark", view.along("landmark", layer, view.keyHead(head))[i]];
}

/** Whether the eps of now evicts a key. */
export function isEvicted(view, state, i) {
  if (!view.gated || state.get("eps") < 0) return false;
  return view.along("evicted_at", state.get("layer"), view.keyHead(state.get("head")))[i] <= state.get("eps");
}

/** Where a selected query's horizons lie: the token one logit away, and that of eps; below 0 is before the text. */
export function horizons(view, state) {
  if (!view.gated) return null;
  const [layer, head, i] = [state.get("layer"), state.get("head"), state.get("token")];
  const eps = state.get("eps") < 0 ? 0.01 : view.header.eps[state.get("eps")];
  return { near: 1 / view.rate(layer, head, i), far: view.horizon(layer, head, i, eps), eps };
}

export class Tokens {
  constructor(view, state, rows, hover) {
    Object.assign(this, { view, state, rows, hover, width: 0 });
    this.canvas = document.getElementById("tokens");
    this.scroller = document.getElementById("scroller");
    this.context = this.canvas.getContext("2d");
    this.marks = new Map();
    for (const mark of view.header.marks) for (let t = 0; t < mark.length; t++) this.marks.set(mark.start + t, mark.label);
    this.scroller.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event, this.at(event)));
    this.canvas.addEventListener("mouseleave", () => this.hover(null, -1));
    new ResizeObserver(() => this.resize()).observe(this.scroller);
  }

  resize() {
    const width = this.scroller.clientWidth - 2 * parseFloat(getComputedStyle(this.scroller).paddingLeft);
    if (width > 0 && width !== this.width) { this.place(width); this.reveal(this.state.get("token")); }
    this.draw();
  }

  /** Give every token its line and its place in it. */
  place(width) {
    const { view, context } = this;
    context.font = FONT;
    const widths = view.shownTexts.map((text) => Math.min(Math.ceil(context.measureText(text).width) + 2 * PAD, width));
    const [token, n] = [view.arrays.token.data, view.n];
    Object.assign(this, { width, left: new Float32Array(n), line: new Int32Array(n), first: [0], widths });
    let x = 0;
    for (let i = 0; i < n; i++) {
      const wide = widths[token[i]];
      if (x > 0 && x + wide > width) { x = 0; this.first.push(i); }
      this.left[i] = x;
      this.line[i] = this.first.length - 1;
      x += wide + GAP;
      if (view.texts[token[i]].endsWith("\n") && i + 1 < n) { x = 0; this.first.push(i + 1); }
    }
    document.getElementById("spacer").style.height = "0px";
    const height = this.first.length * LINE + 16;
    document.getElementById("spacer").style.height = `${Math.max(0, height - this.scroller.clientHeight)}px`;
  }

  draw() {
    if (!this.width) return;
    const height = this.scroller.clientHeight;
    this.canvas.style.height = `${height}px`;
    const c = (this.context = fitted(this.canvas, this.width, height));
    c.clearRect(0, 0, this.width, height);
    c.font = FONT;
    c.textBaseline = "middle";
    const top = this.scroller.scrollTop;
    const from = Math.max(0, Math.floor((top - LINE) / LINE));
    const to = Math.min(this.first.length, Math.ceil((top + height) / LINE));
    const span = horizons(this.view, this.state);
    const also = new Set(this.state.get("also"));
    const last = to < this.first.length ? this.first[to] : this.view.n;
    for (let i = this.first[from] ?? 0; i < last; i++) this.drawToken(c, i, this.line[i] * LINE + 10 - top, also);
    if (span) this.drawHorizons(c, span, top);
  }

  drawToken(c, i, y, also) {
    const { view, state } = this;
    const [x, wide] = [this.left[i], this.widths[view.arrays.token.data[i]]];
    const [scale, byte] = tokenColour(view, state, this.rows, i);
    const evicted = isEvicted(view, state, i);
    c.fillStyle = evicted ? "#eceff2" : SCALES[scale].css[byte];
    c.fillRect(x, y, wide, BOX);
    c.fillStyle = evicted ? FAINT : isDark(scale, byte) ? "#fff" : INK;
    c.fillText(view.label(i), x + PAD, y + BOX / 2 + 1, wide - PAD);
    if (this.marks.has(i)) { c.fillStyle = this.marks.get(i) === "answer" ? ACCENT : "#5b6675"; c.fillRect(x, y + BOX + 1, wide, this.marks.get(i) === "answer" ? 3 : 1.5); }
    if (i === state.get("token") || also.has(i)) {
      c.strokeStyle = i === state.get("token") ? ACCENT : SELECTED;
      c.lineWidth = 2;
      c.setLineDash(i === state.get("token") ? [] : [3, 2]);
      c.strokeRect(x, y, wide, BOX);
      c.setLineDash([]);
    }
  }

  /** Flags at the two horizons, and a line along the text between the nearer one and the query. */
  drawHorizons(c, { near, far, eps }, top) {
    const i = this.state.get("token");
    const y = (t) => this.line[t] * LINE + 10 - top;
    c.fillStyle = ACCENT;
    const begin = Math.max(0, Math.round(i - near));
    for (let t = begin; t <= i; t++) {
      const at = y(t) - 3;
      if (at > -LINE && at < this.canvas.clientHeight) c.fillRect(this.left[t], at, this.widths[this.view.arrays.token.data[t]] + GAP, 2);
    }
    for (const [distance, label] of [[near, `1/rate: ${short(near)} tokens`], [far, `eps ${short(eps)}: ${short(far)} tokens`]]) {
      const t = Math.round(i - distance);
      if (t < 0) continue;
      c.fillRect(this.left[t] - 1, y(t) - 4, 2, BOX + 6);
      c.font = "600 10px system-ui, sans-serif";
      const wide = c.measureText(label).width + 8;
      const x = Math.min(this.left[t] - 1, this.width - wide);
      c.fillRect(x, y(t) - 10, wide, 12);
      c.fillStyle = "#fff";
      c.fillText(label, x + 4, y(t) - 3.5);
      c.fillStyle = ACCENT;
    }
  }

  /** The token under an event, −1 for none. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top + this.scroller.scrollTop - 6) / LINE);
    if (line < 0 || line >= this.first.length) return -1;
    const x = event.clientX - box.left;
    const end = line + 1 < this.first.length ? this.first[line + 1] : this.view.n;
    for (let i = this.first[line]; i < end; i++) if (x >= this.left[i] && x < this.left[i] + this.widths[this.view.arrays.token.data[i]] + GAP) return i;
    return -1;
  }

  click(event) {
    const i = this.at(event);
    if (i < 0) return;
    if (event.shiftKey) toggleAlso(this.state, i);
    else this.state.set({ token: i });
  }

  /** The token a key leads to from the selected one, or null. */
  moved(key) {
    const [i, n] = [this.state.get("token"), this.view.n];
    const lines = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 };
    if (key === "ArrowLeft") return Math.max(0, i - 1);
    if (key === "ArrowRight") return Math.min(n - 1, i + 1);
    if (key === "Home") return 0;
    if (key === "End") return n - 1;
    if (!(key in lines)) return null;
    const line = Math.min(Math.max(this.line[i] + lines[key], 0), this.first.length - 1);
    const end = (line + 1 < this.first.length ? this.first[line + 1] : n) - 1;
    let best = this.first[line];
    while (best < end && this.left[best + 1] <= this.left[i] + 1) best++;
    return best;
  }

  /** Scroll until a token is in sight. */
  reveal(i) {
    if (!this.width) return;
    const [y, top, height] = [this.line[i] * LINE, this.scroller.scrollTop, this.scroller.clientHeight];
    if (y < top + LINE || y > top + height - 2 * LINE) this.scroller.scrollTop = y - height / 2;
  }
}

/** Add a token to those selected besides, or take it away. */
export function toggleAlso(state, i) {
  const also = state.get("also");
  state.set({ also: also.includes(i) ? also.filter((t) => t !== i) : [...also, i] });
}

/** The whole text from left to right: values, attention, marks, horizons and what is evicted. */
export class Strip {
  constructor(view, state, rows, hover) {
    Object.assign(this, { view, state, rows });
    this.canvas = document.getElementById("strip");
    this.canvas.addEventListener("click", (event) => state.set({ token: this.at(event) }));
    this.canvas.addEventListener("mousemove", (event) => hover(event, this.at(event)));
    this.canvas.addEventListener("mouseleave", () => hover(null, -1));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.min(this.view.n - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * this.view.n)));
  }

  draw() {
    const [width, height, n] = [this.canvas.clientWidth, 64, this.view.n];
    if (!width) return;
    const c = fitted(this.canvas, width, height);
    c.clearRect(0, 0, width, height);
    const [base, tall] = [height - 14, height - 26];
    c.fillStyle = "#f5f7f9";
    c.fillRect(0, 12, width, base - 12);
    const x = (t) => (t / n) * width;
    const wide = Math.max(1, width / n);
    const step = Math.max(1, Math.floor(n / width / 4));
    for (let t = 0; t < n; t += step) {
      const [scale, byte] = tokenColour(this.view, this.state, this.rows, t);
      c.fillStyle = isEvicted(this.view, this.state, t) ? "#d3d9df" : SCALES[scale].css[Math.max(byte, 90)];
      const high = (byte / 255) * tall;
      c.fillRect(x(t), base - high, wide, Math.max(high, 1));
    }
    for (const { start, length, label } of this.view.header.marks) {
      c.fillStyle = label === "answer" ? ACCENT : "#5b6675";
      c.fillRect(x(start), base + 2, Math.max(2, x(length)), label === "answer" ? 5 : 3);
    }
    this.drawQuery(c, x, base);
  }

  drawQuery(c, x, base) {
    const i = this.state.get("token");
    const span = horizons(this.view, this.state);
    c.fillStyle = c.strokeStyle = ACCENT;
    if (span) {
      c.fillRect(x(Math.max(0, i - span.near)), 8, Math.max(2, x(Math.min(i, span.near))), 4);
      c.globalAlpha = 0.3;
      c.fillRect(x(Math.max(0, i - span.far)), 8, Math.max(2, x(Math.min(i, span.far))), 4);
      c.globalAlpha = 1;
    }
    c.fillRect(x(i + 0.5) - 1, 4, 2, base);
    c.fillStyle = SELECTED;
    for (const t of this.state.get("also")) c.fillRect(x(t + 0.5) - 0.75, 10, 1.5, base - 6);
  }
}
