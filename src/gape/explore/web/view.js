// A view as src/gape/explore/view.py describes it: a safetensors file whose metadata has the header.

const TYPES = { U8: Uint8Array, I32: Int32Array, F32: Float32Array };
const NAMES = { 9: "⇥", 10: "↵", 13: "␍", 32: " " };
const LONGEST = 48;

/** A token's text as it is shown: what has no shape of its own gets one, and long texts are cut. */
export function shown(text) {
  const cut = text.length > LONGEST ? `${text.slice(0, LONGEST - 8)}…(${text.length.toLocaleString("en")})` : text;
  // Control characters, and those that turn or join the text around them.
  const plain = cut.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/gu, (c) => {
    const code = c.codePointAt(0);
    return NAMES[code] ?? (code < 32 ? String.fromCodePoint(0x2400 + code) : `‹${code.toString(16).toUpperCase()}›`);
  });
  return plain === "" ? "∅" : plain;
}

export class View {
  /** buffer: an ArrayBuffer with a safetensors file. */
  constructor(buffer) {
    const length = Number(new DataView(buffer).getBigUint64(0, true));
    const entries = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
    this.header = JSON.parse(entries.__metadata__.view);
    delete entries.__metadata__;
    this.arrays = {};
    for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
      const start = 8 + length + from;
      const Type = TYPES[dtype];
      const aligned = start % Type.BYTES_PER_ELEMENT === 0;
      const data = aligned ? new Type(buffer, start, (to - from) / Type.BYTES_PER_ELEMENT) : new Type(buffer.slice(start, start + to - from));
      this.arrays[name] = { data, shape };
    }
    const { tokens, model, cell } = this.header;
    Object.assign(this, { n: tokens, layers: model.layers, heads: model.n_heads, keyHeads: model.n_kv_heads, cell, gated: this.header.gated });
    this.groups = this.heads / this.keyHeads;
    this.cells = Math.ceil(tokens / cell);
    this.finest = Math.log2(cell);
    this.texts = this.header.vocabulary;
    this.shownTexts = this.texts.map(shown);
    this.rows = new Map();
    this.tiles = this.storedTiles();
  }

  get kinds() { return this.gated ? ["gated", "plain"] : ["gated"]; }

  keyHead(head) { return Math.floor(head / this.groups); }
  text(i) { return this.texts[this.arrays.token.data[i]]; }
  label(i) { return this.shownTexts[this.arrays.token.data[i]]; }

  /** The values of one head along the text: (N) of an array (L, H, N). */
  along(name, layer, head) {
    const { data, shape } = this.arrays[name];
    const start = (layer * shape[1] + head) * shape[2];
    return data.subarray(start, start + shape[2]);
  }

  /** A number of an array (L, H). */
  value(name, layer, head) {
    const { data, shape } = this.arrays[name];
    return data[layer * shape[1] + head];
  }

  /** What bytes of `gate` and `score` stand for. */
  spread(name, layer, head, byte) {
    const { data } = this.arrays[`${name}_range`];
    const at = 2 * (layer * this.heads + head);
    return data[at] * (data[at + 1] / data[at]) ** (byte / 255);
  }

  gate(layer, head, i) { return this.spread("gate", layer, head, this.along("gate", layer, head)[i]); }
  rate(layer, head, i) { return this.gate(layer, head, i) * this.value("rate_per_gate", layer, head); }
  landmark(layer, head, i) { return this.along("landmark", layer, this.keyHead(head))[i] / 255; }

  /** From this distance on, unprotected keys hold at most eps of query i's attention together. */
  horizon(layer, head, i, eps) {
    const bound = this.spread("score", layer, head, this.along("score", layer, head)[i]);
    return (2 * bound + Math.log(Math.max(i, 1) / eps)) / this.rate(layer, head, i);
  }

  /** Keys (L · Hk · steps of eps) that a step keeps; counted once. */
  get kept() {
    if (this.keptCounts) return this.keptCounts;
    const { data } = this.arrays.evicted_at;
    const steps = this.header.eps.length;
    const counts = new Float64Array((data.length / this.n) * steps).fill(this.n);
    for (let at = 0; at < data.length; at++) {
      const row = Math.floor(at / this.n) * steps;
      for (let step = data[at]; step < steps; step++) counts[row + step]--;
    }
    return (this.keptCounts = counts);
  }

  /** The attention that a byte of a map stands for. */
  weight(byte) { return byte === 0 ? 0 : this.header.least_weight ** (1 - byte / 255); }

  /** Tiles that came with the view, by "kind/layer/head/level/row/column". */
  storedTiles() {
    const tiles = new Map();
    const size = this.header.tile ** 2;
    for (const [name, { data }] of Object.entries(this.arrays)) {
      if (!name.startsWith("index_")) continue;
      const head = name.slice(6);
      const cells = this.arrays[`tiles_${head}`].data;
      for (let t = 0; t < data.length / 3; t++) tiles.set(`${head}/${data.slice(3 * t, 3 * t + 3).join("/")}`, cells.subarray(t * size, (t + 1) * size));
    }
    return tiles;
  }

  /** The finest level that there is of a head. */
  finestOf(layer, head) { return this.header.live ? this.finest : this.header.full[`${layer}.${head}`] ?? 0; }

  /** The map of the whole text of a head, (cells, cells). */
  wholeMap(kind, layer, head) {
    const size = this.cells ** 2;
    const start = (layer * this.heads + head) * size;
    return this.arrays[`map_${kind}`].data.subarray(start, start + size);
  }

  /** A tile of level 1 or finer: its cells, or null where it is empty. */
  async tile(kind, layer, head, level, row, column) {
    if (column > row) return null;
    if (!this.header.live) return this.tiles.get(`${kind}/${layer}/${head}/${level}/${row}/${column}`) ?? null;
    return fetchBytes(`tile?kind=${kind}&layer=${layer}&head=${head}&level=${level}&row=${row}&column=${column}`);
  }

  /** Attention of query i to every token: bytes (N), and how many tokens share one. */
  async row(kind, layer, head, i) {
    const key = `${kind}/${layer}/${head}/${i}`;
    if (!this.rows.has(key)) {
      if (this.rows.size > 256) this.rows.delete(this.rows.keys().next().value);
      this.rows.set(key, this.header.live ? { bytes: await fetchBytes(`row?kind=${kind}&layer=${layer}&head=${head}&query=${i}`), cell: 1 } : await this.pooledRow(kind, layer, head, i));
    }
    return this.rows.get(key);
  }

  async pooledRow(kind, layer, head, i) {
    const level = this.finestOf(layer, head);
    const cell = this.cell >> level;
    const bytes = new Uint8Array(this.n);
    const [y, tile] = [Math.floor(i / cell), this.header.tile];
    const whole = level === 0 ? this.wholeMap(kind, layer, head) : null;
    for (let x = 0; x <= y; x++) {
      const column = Math.floor(x / tile);
      const part = whole ?? (await this.tile(kind, layer, head, level, Math.floor(y / tile), column));
      if (part === null) { x = (column + 1) * tile - 1; continue; }
      const byte = whole ? part[y * this.cells + x] : part[(y % tile) * tile + (x % tile)];
      bytes.fill(byte, x * cell, Math.min((x + 1) * cell, i + 1));
    }
    return { bytes, cell };
  }

  /** Likely next tokens of a position: texts and probabilities. */
  predictions(kind, i) {
    const places = this.arrays[kind === "gated" ? "next" : "plain"];
    const shares = this.arrays[kind === "gated" ? "next_probability" : "plain_probability"].data;
    const count = places.shape[1];
    return Array.from({ length: count }, (_, p) => ({ label: this.shownTexts[places.data[i * count + p]], share: shares[i * count + p] / 255 }));
  }
}

async function fetchBytes(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return new Uint8Array(await answer.arrayBuffer());
}

/** The view of this page: inside it, or from the server that sent it. */
export async function loadView() {
  const inside = document.getElementById("view");
  if (inside === null) return new View(await (await fetch("view")).arrayBuffer());
  const packed = Uint8Array.from(atob(inside.textContent), (c) => c.charCodeAt(0));
  inside.remove();
  return new View(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}
