import { short } from "./colours.js";
import { element } from "./elements.js";
import { horizons, isEvicted } from "./tokens.js";

// What is known of the selected token: its gates, the keys it attends to, and what the model expects next.

const TOP = 5;

/** The keys with the most attention, largest first: token and attention. */
export function strongest(view, { bytes, cell }, i, count) {
  const keys = [];
  for (let j = 0; j <= i; j += cell) {
    if (bytes[j] > 0 && (keys.length < count || bytes[j] > keys[keys.length - 1].byte)) {
      keys.push({ key: j, byte: bytes[j], share: view.weight(bytes[j]) });
      keys.sort((a, b) => b.byte - a.byte || b.key - a.key);
      keys.length = Math.min(keys.length, count);
    }
  }
  return keys;
}

export class Details {
  constructor(view, state, rows) { Object.assign(this, { view, state, rows, home: document.getElementById("details") }); }

  draw() {
    const { view, state, home } = this;
    const i = state.get("token");
    const title = element("div", { className: "bar" }, [element("h2", { text: `Token ${i.toLocaleString("en")}` }), element("span", { className: "token", text: view.label(i), dir: "auto" })]);
    const lists = [...this.lists("Attends to", (kind) => this.attended(kind, i)), ...this.lists("Next token", (kind) => this.predicted(kind, i))];
    home.replaceChildren(title, this.values(i), element("div", { className: "columns" }, lists), ...this.others());
  }

  /** Numbers of the selected token as query and as key. */
  values(i) {
    const { view, state } = this;
    const [layer, head] = [state.get("layer"), state.get("head")];
    if (!view.gated) return element("p", { className: "note", text: "This model has no gates." });
    const { near, far, eps } = horizons(view, state);
    const pairs = [
      ["query gate g", short(view.gate(layer, head, i))], ["landmark l", view.landmark(layer, head, i).toFixed(2)],
      ["1/rate", `${short(near)} tokens`], [`horizon, eps ${short(eps)}`, `${short(far)} tokens`],
      ["as a key", state.get("eps") < 0 ? "kept" : isEvicted(view, state, i) ? "evicted" : "kept"],
    ];
    return element("dl", {}, pairs.map(([name, value]) => element("div", {}, [element("dt", { text: name }), element("dd", { text: value })])));
  }

  /** One list with gates, and one without where there are gates. */
  lists(heading, list) {
    return this.view.kinds.map((kind) => element("div", {}, [element("h3", { text: kind === "plain" ? "without gates" : heading }), list(kind)]));
  }

  attended(kind, i) {
    const row = this.rows[kind];
    if (!row) return element("p", { className: "note", text: "…" });
    const items = strongest(this.view, row, i, TOP).map(({ key, share }) => {
      const place = row.cell > 1 ? `${key}–${Math.min(key + row.cell - 1, i)}` : String(key);
      const label = row.cell > 1 ? `${this.view.label(key)} …` : this.view.label(key);
      const item = this.item(label, `${place} · ${share.toFixed(share < 0.01 ? 4 : 2)}`, share);
      item.addEventListener("click", () => this.state.set({ also: [...new Set([...this.state.get("also"), key])] }));
      return item;
    });
    return element("ol", {}, items);
  }

  predicted(kind, i) {
    return element("ol", {}, this.view.predictions(kind, i).map(({ label, share }) => this.item(label, share.toFixed(2), share)));
  }

  item(label, value, share) {
    const bar = element("span", { "aria-hidden": "true" });
    bar.style.width = `${100 * share}%`;
    return element("li", {}, [bar, element("b", { text: label, dir: "auto" }), element("i", { text: value })]);
  }

  /** The tokens selected besides: their landmark, and what they get of the selected query. */
  others() {
    const { view, state } = this;
    const [i, also] = [state.get("token"), state.get("also")];
    if (!also.length) return [element("p", { className: "note", text: "Shift-click adds a token to compare." })];
    const items = also.map((t) => {
      const parts = [String(t)];
      if (view.gated) parts.push(`l ${view.landmark(state.get("layer"), state.get("head"), t).toFixed(2)}`);
      const share = t <= i && this.rows.gated ? view.weight(this.rows.gated.bytes[t]) : 0;
      if (t <= i) parts.push(`attention ${share.toFixed(share < 0.01 ? 4 : 2)}`);
      return this.item(view.label(t), parts.join(" · "), share);
    });
    const clear = element("button", { text: "Clear", type: "button" });
    clear.addEventListener("click", () => state.set({ also: [] }));
    return [element("div", { className: "bar" }, [element("h2", { text: "Also selected" }), clear]), element("ol", {}, items)];
  }
}
