import { bytesText, paintScale, short } from "./colours.js";
import { loadView, shown } from "./view.js";
import { State } from "./state.js";
import { Strip, Tokens, isEvicted, toggleAlso } from "./tokens.js";
import { Heads } from "./heads.js";
import { Maps } from "./map.js";
import { Details } from "./details.js";
import { element, tip } from "./elements.js";

// The page: parts, what moves between them, keys, search and the link.

const byId = (id) => document.getElementById(id);

class Page {
  constructor(view) {
    this.view = view;
    this.rows = {};
    const colours = view.gated ? ["landmark", "gate", "attention"] : ["attention"];
    const steps = view.gated ? view.header.eps.length : 0;
    this.heads = null;
    const metrics = ["horizon", "density", "entropy", "retrieval"].slice(view.gated ? 0 : 2);
    this.state = new State({ layer: view.layers, head: view.heads, token: view.n, eps: steps }, colours, metrics);
    this.state.set(this.first());
    const hover = (event, i) => tip(event, event && i >= 0 ? this.words(i) : "");
    this.tokens = new Tokens(view, this.state, this.rows, hover);
    this.strip = new Strip(view, this.state, this.rows, hover);
    this.heads = new Heads(view, this.state, tip);
    this.maps = new Maps(view, this.state, tip);
    this.details = new Details(view, this.state, this.rows);
    this.controls(colours);
    this.state.listeners.push((changed) => this.update(changed));
    addEventListener("hashchange", () => this.state.read(location.hash));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  /** What is shown at first: the head that retrieves most. */
  first() {
    const { data, shape } = this.view.arrays.retrieval_gated;
    const best = data.indexOf(Math.max(...data));
    return { layer: Math.floor(best / shape[1]), head: best % shape[1] };
  }

  async start() {
    this.state.read(location.hash);
    await this.update(new Set(Object.keys(this.state.values)));
    document.documentElement.dataset.ready = "yes";
    performance.mark("gape-ready");
  }

  controls(colours) {
    const { view, state } = this;
    const { model, tokens } = view.header;
    byId("about").textContent = [model.name, model.position, `${view.layers} layers of ${view.heads} heads`, `${tokens.toLocaleString("en")} tokens`, model.context_length ? `T = ${model.context_length.toLocaleString("en")}` : ""].filter(Boolean).join(" · ");
    for (const name of colours) {
      const input = element("input", { type: "radio", name: "colour", value: name });
      input.addEventListener("change", () => state.set({ colour: name }));
      byId("colour").append(element("label", {}, [input, document.createTextNode(name)]));
    }
    for (const { name, label } of this.heads.metrics) byId("metric").append(element("option", { text: label, value: name }));
    byId("metric").addEventListener("change", (event) => state.set({ metric: event.target.value }));
    byId("eps-control").hidden = byId("bytes").hidden = byId("plain-figure").hidden = !view.gated;
    byId("maps").classList.toggle("single", !view.gated);
    if (view.gated) byId("eps").max = String(view.header.eps.length - 1);
    byId("eps").addEventListener("input", (event) => state.set({ eps: Number(event.target.value) }));
    byId("map-reset").addEventListener("click", () => this.maps.linked.show(null));
    paintScale(byId("map-scale"), "attention");
    byId("map-ends").textContent = `${view.header.least_weight} to 1, by its logarithm`;
    byId("search").addEventListener("submit", (event) => { event.preventDefault(); this.find(1); });
    byId("query").addEventListener("input", (event) => { state.set({ search: event.target.value }); this.find(0); });
    byId("export").hidden = !("live" in view.header);
    byId("export").addEventListener("click", () => { byId("export").href = `export?heads=${state.get("layer")}.${state.get("head")}`; });
    byId("export").href = "export";
    byId("export").download = "gape-explore.html";
  }

  /** Draw again what depends on the values that changed. */
  async update(changed) {
    const { state } = this;
    const any = (...names) => names.some((name) => changed.has(name));
    if (any("area")) this.maps.linked.show(state.get("area"));
    if (any("token")) this.tokens.reveal(state.get("token"));
    this.draw(changed);
    this.link();
    if (any("layer", "head", "token")) await this.readRows();
  }

  draw(changed) {
    const any = (...names) => names.some((name) => changed.has(name));
    if (any("layer", "head", "metric")) this.heads.draw();
    if (any("layer", "head", "token", "also", "eps", "colour", "rows")) { this.tokens.draw(); this.strip.draw(); }
    if (any("layer", "head", "token", "also", "eps", "rows")) this.details.draw();
    if (any("layer", "head", "token", "also", "eps", "area")) this.maps.linked.request();
    this.labels(changed);
  }

  /** The rows of the selected query; those of an earlier selection are dropped. */
  async readRows() {
    const { view, state } = this;
    const [layer, head, token] = ["layer", "head", "token"].map((name) => state.get(name));
    const rows = await Promise.all(view.kinds.map((kind) => view.row(kind, layer, head, token))).catch((error) => this.failed(error));
    if (layer !== state.get("layer") || head !== state.get("head") || token !== state.get("token")) return;
    // Without an answer nothing is shown, instead of the attention of an earlier query.
    view.kinds.forEach((kind, number) => { this.rows[kind] = rows?.[number]; });
    this.draw(new Set(["rows"]));
  }

  failed(error) {
    console.warn(error.message);
    byId("about").textContent = "No answer from gape explore. Is it still running? Start it again for the attention of other tokens.";
  }

  labels(changed) {
    const { view, state } = this;
    byId("map-where").textContent = state.get("area") ? `zoom ${short(state.get("area")[2], 2)}×` : "";
    if (changed.size === 1 && changed.has("area")) return;
    const [layer, head, colour] = [state.get("layer"), state.get("head"), state.get("colour")];
    const shared = view.groups > 1 ? ` (key head ${view.keyHead(head)})` : "";
    byId("head-name").textContent = `Layer ${layer}, head ${head}${shared}`;
    byId("head-values").textContent = this.heads.values(layer, head).join(" · ");
    for (const input of byId("colour").querySelectorAll("input")) input.checked = input.value === colour;
    byId("metric").value = state.get("metric");
    paintScale(byId("scale"), colour);
    const ends = { landmark: "l: 0 to 1", attention: "of the selected query", gate: "" };
    if (colour === "gate") ends.gate = `g: ${short(view.spread("gate", layer, head, 0), 2)} to ${short(view.spread("gate", layer, head, 255), 2)}`;
    byId("scale-ends").textContent = ends[colour];
    if (document.activeElement !== byId("query")) byId("query").value = state.get("search");
    if (view.gated) this.epsLabels(layer, head);
    byId("live").textContent = this.words(state.get("token"));
  }

  epsLabels(layer, head) {
    const { view, state } = this;
    const step = state.get("eps");
    byId("eps").value = String(step);
    byId("eps-value").textContent = step < 0 ? "off" : short(view.header.eps[step]);
    const each = view.header.bytes_per_key;
    const total = view.n * view.layers * view.keyHeads;
    if (step < 0) { byId("bytes").textContent = `Cache: ${bytesText(total * each)} in bfloat16. Move eps to see what may be evicted.`; return; }
    const steps = view.header.eps.length;
    let kept = 0;
    for (let row = 0; row < view.layers * view.keyHeads; row++) kept += view.arrays.floor.data[row] ? view.kept[row * steps + step] : view.n;
    const own = view.kept[(layer * view.keyHeads + view.keyHead(head)) * steps + step];
    const floor = view.value("floor", layer, view.keyHead(head));
    const note = floor ? "" : "; without a floor a cache evicts none of them";
    byId("bytes").textContent = `This head may evict ${(view.n - own).toLocaleString("en")} of ${view.n.toLocaleString("en")} keys${note}. The cache keeps ${bytesText(kept * each)} of ${bytesText(total * each)}.`;
  }

  /** A token in words, for the pointer and for readers of the screen. */
  words(i) {
    const { view, state } = this;
    const [layer, head] = [state.get("layer"), state.get("head")];
    const lines = [`${i}: ${view.label(i)}`];
    if (view.gated) lines.push(`landmark ${view.landmark(layer, head, i).toFixed(2)}, gate ${short(view.gate(layer, head, i))}`, `1/rate ${short(1 / view.rate(layer, head, i))} tokens`);
    if (this.rows.gated && i <= state.get("token")) lines.push(`attention ${short(view.weight(this.rows.gated.bytes[i]), 2)}`);
    if (isEvicted(view, state, i)) lines.push("evicted at this eps");
    const mark = this.tokens?.marks.get(i);
    return (mark ? [...lines, mark] : lines).join("\n");
  }

  /** Select the next token at which the searched text begins; 0 stays where it is if it fits. */
  find(step) {
    const { view, state } = this;
    const places = this.matches(state.get("search"));
    const now = state.get("token");
    if (places.length) {
      const next = places.find((t) => t >= now + step) ?? places[0];
      state.set({ token: next });
    }
    byId("matches").textContent = state.get("search") === "" ? "" : places.length ? `${places.indexOf(state.get("token")) + 1} of ${places.length.toLocaleString("en")}` : "none";
  }

  /** Tokens in which an occurrence of a text begins, whatever its case. */
  matches(search) {
    if (search === "") return [];
    const { view } = this;
    if (!this.whole) {
      this.starts = new Int32Array(view.n);
      const parts = [];
      let length = 0;
      for (let i = 0; i < view.n; i++) { this.starts[i] = length; parts.push(view.text(i).toLowerCase()); length += parts[i].length; }
      this.whole = parts.join("");
    }
    const places = [];
    let token = 0;
    for (let at = this.whole.indexOf(search.toLowerCase()); at >= 0; at = this.whole.indexOf(search.toLowerCase(), at + 1)) {
      while (token + 1 < view.n && this.starts[token + 1] <= at) token++;
      if (places[places.length - 1] !== token) places.push(token);
    }
    return places;
  }

  key(event) {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { event.preventDefault(); byId("query").focus(); return; }
    if (event.key === "Escape") { this.state.set({ also: [] }); return; }
    const next = this.tokens.moved(event.key);
    if (next === null) return;
    event.preventDefault();
    if (event.shiftKey) toggleAlso(this.state, next);
    else this.state.set({ token: next });
  }

  /** Put the state behind #, at most a few times a second. */
  link() {
    clearTimeout(this.linking);
    // A page inside a notebook has no address of its own.
    this.linking = setTimeout(() => { if (location.href.split("#")[0] !== "about:srcdoc") history.replaceState(null, "", this.state.link()); }, 150);
  }
}

try {
  await new Page(await loadView()).start();
} catch (error) {
  document.body.prepend(element("p", { text: `The page could not be shown: ${shown(String(error.message))}` }));
  throw error;
}
