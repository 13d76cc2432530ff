import { ACCENT, SELECTED, short } from "./colours.js";
import { Linked, Sheet, painted } from "./tiles.js";
import { horizons, toggleAlso } from "./tokens.js";

// Attention of queries (down) to keys (across) by tiles: the whole text first, finer tiles where they are looked at.

const TILES_KEPT = 192;

/** Painted tiles of both maps, the latest used last. */
class TileStore {
  constructor(view) { Object.assign(this, { view, tiles: new Map(), waiting: new Set() }); }

  whole(kind, layer, head) {
    const key = `${kind}/${layer}/${head}`;
    const cells = this.view.wholeMap(kind, layer, head);
    return this.kept(key) ?? this.keep(key, { cells, image: painted(cells, this.view.cells, this.view.cells) });
  }

  /** A painted tile, null for an empty one, undefined while it is on its way; `ready` is called when it has come. */
  tile(kind, layer, head, level, row, column, ready) {
    const key = [kind, layer, head, level, row, column].join("/");
    if (this.tiles.has(key)) return this.kept(key);
    if (this.waiting.has(key)) return undefined;
    this.waiting.add(key);
    const size = this.view.header.tile;
    this.view.tile(kind, layer, head, level, row, column)
      .then((cells) => this.keep(key, cells && { cells, image: painted(cells, size, size) }))
      .then(() => { this.waiting.delete(key); ready(); })
      // It stays among those that are waited for, so that it is not asked for again; the whole map shows in its place.
      .catch((error) => console.warn(`tile ${key}: ${error.message}`));
    return undefined;
  }

  /** The byte of a query and a key at a level if its tile is here, else of the whole map; and the tokens of a cell. */
  byte(kind, layer, head, level, query, key) {
    const size = this.view.header.tile;
    for (let finer = level; finer > 0; finer--) {
      const cell = this.view.cell >> finer;
      const [y, x] = [Math.floor(query / cell), Math.floor(key / cell)];
      const tile = this.tiles.get([kind, layer, head, finer, Math.floor(y / size), Math.floor(x / size)].join("/"));
      if (tile !== undefined) return [tile ? tile.cells[(y % size) * size + (x % size)] : 0, cell];
    }
    const cell = this.view.cell;
    return [this.view.wholeMap(kind, layer, head)[Math.floor(query / cell) * this.view.cells + Math.floor(key / cell)], cell];
  }

  kept(key) {
    const tile = this.tiles.get(key);
    if (tile !== undefined) { this.tiles.delete(key); this.tiles.set(key, tile); }
    return tile;
  }

  keep(key, tile) {
    this.tiles.set(key, tile);
    while (this.tiles.size > TILES_KEPT) this.tiles.delete(this.tiles.keys().next().value);
    return tile;
  }
}

export class Maps {
  constructor(view, state, tip) {
    Object.assign(this, { view, state, tip, store: new TileStore(view) });
    const canvases = view.kinds.map((kind) => document.getElementById(`map-${kind}`));
    this.linked = new Linked(canvases, {
      most: Math.max(1, view.n / 16),
      draw: (number, zoom) => this.draw(view.kinds[number], zoom),
      moved: (area) => state.set({ area }),
    });
    for (const [number, canvas] of canvases.entries()) {
      const zoom = this.linked.zooms[number];
      canvas.addEventListener("click", (event) => this.click(event, zoom));
      canvas.addEventListener("mousemove", (event) => this.hover(event, view.kinds[number], zoom));
      canvas.addEventListener("mouseleave", () => tip(null));
    }
  }

  draw(kind, { element, x, y, zoom }) {
    const { view, state } = this;
    const [layer, head] = [state.get("layer"), state.get("head")];
    const sheet = new Sheet(element, view.n, { x, y, zoom });
    sheet.put(this.store.whole(kind, layer, head).image, 0, 0, view.cells * view.cell);
    const level = Math.min(view.finestOf(layer, head), Math.max(0, Math.ceil(Math.log2(view.cell * sheet.scale) - 0.5)));
    if (level > 0) {
      const size = (view.cell >> level) * view.header.tile;
      const edge = (from) => [Math.floor((from * view.n) / size), Math.floor((Math.min(from + 1 / zoom, 1) * view.n - 1e-6) / size)];
      const [[r0, r1], [c0, c1]] = [edge(y), edge(x)];
      for (let r = r0; r <= r1; r++) {
        for (let k = c0; k <= Math.min(c1, r); k++) {
          const tile = this.store.tile(kind, layer, head, level, r, k, () => this.linked.request());
          if (tile !== undefined) sheet.put(tile?.image, r * size, k * size, size);
        }
      }
    }
    sheet.hideFuture();
    this.drawLines(sheet, kind);
  }

  drawLines(sheet, kind) {
    const { state } = this;
    const { c, side } = sheet;
    const i = state.get("token");
    const row = sheet.down(i + 0.5);
    c.lineWidth = 1;
    c.strokeStyle = ACCENT;
    c.beginPath();
    c.moveTo(0, row);
    c.lineTo(Math.min(side, sheet.across(i + 1)), row);
    c.stroke();
    c.strokeStyle = SELECTED;
    c.setLineDash([3, 3]);
    c.beginPath();
    for (const t of state.get("also")) { c.moveTo(sheet.across(t + 0.5), Math.max(0, sheet.down(t))); c.lineTo(sheet.across(t + 0.5), side); }
    c.stroke();
    c.setLineDash([]);
    const span = kind === "gated" ? horizons(this.view, state) : null;
    if (!span) return;
    c.fillStyle = ACCENT;
    for (const distance of [span.near, span.far]) if (distance < i) c.fillRect(sheet.across(i + 0.5 - distance) - 1, row - 5, 2, 10);
  }

  /** The query and key at a place, or null beyond the text and after the query. */
  pair(event, zoom) {
    const [x, y] = zoom.inside(...zoom.place(event));
    const [query, key] = [Math.floor(y * this.view.n), Math.floor(x * this.view.n)];
    return query >= 0 && query < this.view.n && key >= 0 && key <= query ? { query, key } : null;
  }

  click(event, zoom) {
    const pair = zoom.dragged ? null : this.pair(event, zoom);
    if (!pair) return;
    if (event.shiftKey) toggleAlso(this.state, pair.key);
    else this.state.set({ token: pair.query });
  }

  hover(event, kind, zoom) {
    const pair = this.pair(event, zoom);
    if (!pair) return this.tip(null);
    const { view, state } = this;
    const [byte, cell] = this.store.byte(kind, state.get("layer"), state.get("head"), view.finest, pair.query, pair.key);
    const pooled = cell > 1 ? ` at most, among ${cell} × ${cell} tokens` : "";
    this.tip(event, `query ${pair.query} ${view.label(pair.query)}\nkey ${pair.key} ${view.label(pair.key)}\nattention ${byte ? short(view.weight(byte), 2) : `below ${short(view.weight(1))}`}${pooled}`);
  }
}
