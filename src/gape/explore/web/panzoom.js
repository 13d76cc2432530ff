// Zoom and move a square or rectangle with wheel, drag, two fingers and keys. Maps and the figures of reports use it.

export class PanZoom {
  /**
   * element: what listens. changed: called with this after every change. most: the largest zoom. needsControl: whether the wheel
   * zooms with Ctrl alone, for pages that scroll. `dragged` tells a drag from a click.
   */
  constructor(element, { most, changed, needsControl = false }) {
    Object.assign(this, { element, most, changed, needsControl, x: 0, y: 0, zoom: 1, dragged: false, points: new Map() });
    element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    element.addEventListener("pointerdown", (event) => this.press(event));
    element.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) element.addEventListener(end, (event) => this.points.delete(event.pointerId));
    element.addEventListener("dblclick", (event) => this.zoomAt(2, ...this.place(event)));
    element.addEventListener("keydown", (event) => this.key(event));
  }

  /** Where an event is, in parts of the element from 0 to 1. */
  place(event) {
    const box = this.element.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  /** The place of the whole that is drawn at a part of the element. */
  inside(px, py) { return [this.x + px / this.zoom, this.y + py / this.zoom]; }

  /** Show the part whose upper left corner is (x, y) at a zoom. */
  show(x, y, zoom) {
    this.zoom = Math.min(Math.max(zoom, 1), this.most);
    const rest = 1 - 1 / this.zoom;
    this.x = Math.min(Math.max(x, 0), rest);
    this.y = Math.min(Math.max(y, 0), rest);
    this.changed(this);
  }

  zoomAt(factor, px, py) {
    const [x, y] = this.inside(px, py);
    const zoom = Math.min(Math.max(this.zoom * factor, 1), this.most);
    this.show(x - px / zoom, y - py / zoom, zoom);
  }

  wheel(event) {
    // At the end of its zoom the page scrolls on.
    if ((event.deltaY > 0 && this.zoom === 1) || (this.needsControl && !event.ctrlKey && !event.metaKey)) return;
    event.preventDefault();
    this.zoomAt(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.0018)), ...this.place(event));
  }

  press(event) {
    this.points.set(event.pointerId, this.place(event));
    this.dragged = false;
    this.element.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const before = this.points.get(event.pointerId);
    if (before === undefined) return;
    const now = this.place(event);
    const box = this.element.getBoundingClientRect();
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    if (Math.hypot(dx * box.width, dy * box.height) < 3 && !this.dragged) return;
    this.dragged = true;
    if (this.points.size === 2) {
      const other = [...this.points].find(([id]) => id !== event.pointerId)[1];
      const apart = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]);
      this.zoomAt(apart(now) / Math.max(apart(before), 1e-3), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else {
      this.show(this.x - dx / this.zoom, this.y - dy / this.zoom, this.zoom);
    }
    this.points.set(event.pointerId, now);
  }

  key(event) {
    const step = 0.15 / this.zoom;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key in moves) this.show(this.x + moves[event.key][0], this.y + moves[event.key][1], this.zoom);
    else if (event.key === "+" || event.key === "=") this.zoomAt(1.5, 0.5, 0.5);
    else if (event.key === "-") this.zoomAt(1 / 1.5, 0.5, 0.5);
    else if (event.key === "0") this.show(0, 0, 1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
