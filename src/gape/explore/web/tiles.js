import { SCALES, fitted } from "./colours.js";
import { PanZoom } from "./panzoom.js";

// Square maps of queries (down) and keys (across), painted from bytes. The explorer and reports draw theirs with it.

/** Cells as a small canvas, which the browser scales. */
export function painted(cells, width, height) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const { rgb } = SCALES.attention;
  for (let at = 0; at < cells.length; at++) {
    image.data.set(rgb.subarray(3 * cells[at], 3 * cells[at] + 3), 4 * at);
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A part of the map of n tokens on a canvas: what puts tiles on it, and greys what lies after a query. */
export class Sheet {
  constructor(canvas, n, { x, y, zoom }) {
    this.side = canvas.clientWidth;
    this.c = fitted(canvas, this.side, this.side);
    // Pixels of a token.
    this.scale = (this.side * zoom) / n;
    Object.assign(this, { n, left: x * n, top: y * n });
    this.c.imageSmoothingEnabled = false;
    this.put(null, 0, 0, n);
  }

  across(key) { return (key - this.left) * this.scale; }
  down(query) { return (query - this.top) * this.scale; }

  /** Draw a painted tile of `size` tokens, white for none. */
  put(image, query, key, size) {
    const box = [this.across(key), this.down(query), size * this.scale, size * this.scale];
    if (image) this.c.drawImage(image, ...box);
    else { this.c.fillStyle = "#fff"; this.c.fillRect(...box); }
  }

  hideFuture() {
    const { c, n } = this;
    c.fillStyle = "#f1f3f6";
    c.beginPath();
    c.moveTo(this.across(0), this.down(0));
    c.lineTo(this.across(n), this.down(0));
    c.lineTo(this.across(n), this.down(n));
    c.fill();
  }
}

/** Canvases that zoom and move together and are drawn once a frame. */
export class Linked {
  /** draw: called with the number of a canvas and its PanZoom. moved: called with the part, null for the whole. */
  constructor(canvases, { draw, moved = () => {}, ...options }) {
    Object.assign(this, { draw, moved, pending: false });
    this.zooms = canvases.map((canvas) => new PanZoom(canvas, { ...options, changed: (zoom) => this.follow(zoom) }));
    const sized = new ResizeObserver(() => this.request());
    for (const canvas of canvases) sized.observe(canvas);
  }

  follow({ x, y, zoom }) {
    for (const other of this.zooms) Object.assign(other, { x, y, zoom });
    this.moved(zoom === 1 ? null : [x, y, zoom]);
    this.request();
  }

  /** Show a part, null for the whole. */
  show(part) {
    const [x, y, zoom] = part ?? [0, 0, 1];
    const lead = this.zooms[0];
    if (x !== lead.x || y !== lead.y || zoom !== lead.zoom) lead.show(x, y, zoom);
  }

  request() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const [number, zoom] of this.zooms.entries()) if (zoom.element.clientWidth) this.draw(number, zoom);
    });
  }
}
