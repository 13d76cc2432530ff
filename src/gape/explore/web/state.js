// What is chosen on the page. It stands in the address behind #, so that a link shows the same.

const NUMBERS = { layer: "l", head: "h", token: "t", eps: "e" };

export class State {
  /** limits: the number of layers, heads, tokens and steps of eps; colours: names. */
  constructor(limits, colours, metrics) {
    Object.assign(this, { limits, colours, metrics, listeners: [] });
    this.values = { layer: 0, head: 0, token: limits.token - 1, eps: -1, also: [], colour: colours[0], metric: metrics[0], area: null, search: "" };
  }

  get(name) { return this.values[name]; }

  /** Change some values; listeners are called with the names of those that are new. */
  set(changes) {
    const changed = Object.keys(changes).filter((name) => JSON.stringify(changes[name]) !== JSON.stringify(this.values[name]));
    if (!changed.length) return;
    Object.assign(this.values, changes);
    for (const listener of this.listeners) listener(new Set(changed));
  }

  /** The text behind # for the values of now. */
  link() {
    const v = this.values;
    const parts = Object.entries(NUMBERS).map(([name, key]) => `${key}=${v[name]}`);
    parts.push(`c=${v.colour}`, `m=${v.metric}`);
    if (v.also.length) parts.push(`a=${v.also.join(",")}`);
    if (v.area) parts.push(`z=${v.area.map((x) => x.toFixed(5)).join(",")}`);
    if (v.search) parts.push(`s=${encodeURIComponent(v.search)}`);
    return `#${parts.join("&")}`;
  }

  /** Values from the text behind #; what is out of range or unknown is left as it is. */
  read(link) {
    const given = new URLSearchParams(link.replace(/^#/, ""));
    const changes = {};
    for (const [name, key] of Object.entries(NUMBERS)) {
      const value = Number(given.get(key));
      const least = name === "eps" ? -1 : 0;
      if (given.has(key) && Number.isInteger(value) && value >= least && value < this.limits[name]) changes[name] = value;
    }
    const tokens = (given.get("a") ?? "").split(",").filter(Boolean).map(Number);
    if (given.has("t")) changes.also = tokens.filter((t) => Number.isInteger(t) && t >= 0 && t < this.limits.token);
    if (this.colours.includes(given.get("c"))) changes.colour = given.get("c");
    if (this.metrics.includes(given.get("m"))) changes.metric = given.get("m");
    const area = (given.get("z") ?? "").split(",").map(Number);
    if (area.length === 3 && area.every(Number.isFinite)) changes.area = area;
    if (given.has("s")) changes.search = given.get("s").slice(0, 200);
    this.set(changes);
  }
}
