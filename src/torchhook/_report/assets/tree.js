// The tree: only the rows in sight exist, so that a thousand layers scroll like ten.

class Tree {
  constructor(layers, troubles, onSelect) {
    this.layers = layers;
    this.troubles = troubles;
    this.onSelect = onSelect;
    this.view = document.getElementById("tree");
    this.rows = document.getElementById("rows");
    this.height = 28;
    this.children = layers.map(() => []);
    layers.forEach((layer, i) => { if (layer.parent >= 0) this.children[layer.parent].push(i); });
    // Every row is a grid of its own, so that none can fit the column of types to the longest.
    const longest = Math.max(...layers.map((layer) => layer.type.length));
    this.view.parentElement.style.setProperty("--type", `${Math.min(Math.max(longest, 12), 24) * 7.6}px`);
    this.open = new Set([0]);
    this.selected = 0;
    this.words = [];
    this.all = false;
    // Unfold level by level for as long as it stays easy to take in.
    for (let depth = 1, shown = this.children[0].length; ; depth += 1) {
      const parents = layers.map((_, i) => i).filter((i) => layers[i].depth === depth && this.children[i].length);
      shown += parents.reduce((sum, i) => sum + this.children[i].length, 0);
      if (!parents.length || shown > 80) break;
      parents.forEach((i) => this.open.add(i));
    }
    this.view.addEventListener("scroll", () => this.draw(), { passive: true });
    this.view.addEventListener("keydown", (event) => this.key(event));
    this.rows.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.draw()).observe(this.view);
    this.refresh();
  }

  // -- what is visible

  refresh() {
    this.visible = [];
    const matches = this.words.length ? this.matching() : null;
    const walk = (i) => {
      if (matches && !matches.has(i)) return;
      this.visible.push(i);
      if (matches || this.open.has(i) || (this.all && this.layers.length <= 400)) this.children[i].forEach(walk);
    };
    walk(0);
    this.rows.style.height = `${this.visible.length * this.height}px`;
    this.draw(true);
    return matches;
  }

  matching() {
    const kept = new Set();
    this.hits = [];
    this.layers.forEach((layer, i) => {
      const text = `${layer.path} ${layer.type}`.toLowerCase();
      if (!this.words.every((word) => text.includes(word))) return;
      this.hits.push(i);
      for (let above = i; above >= 0 && !kept.has(above); above = this.layers[above].parent) kept.add(above);
    });
    return kept;
  }

  search(text) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.hits = [];
    this.refresh();
    if (this.words.length) this.view.scrollTop = 0;
    else this.reveal(this.selected);
    return this.hits.length;
  }

  // -- drawing

  draw(again = false) {
    const top = this.all ? 0 : Math.max(0, Math.floor(this.view.scrollTop / this.height) - 8);
    const fit = Math.ceil(this.view.clientHeight / this.height) + 16;
    const end = this.all ? this.visible.length : Math.min(this.visible.length, top + fit);
    if (!again && this.drawn === `${top}:${end}`) return;
    this.drawn = `${top}:${end}`;
    const made = [];
    for (let at = top; at < end; at += 1) made.push(this.row(this.visible[at], at));
    this.rows.replaceChildren(...made);
    this.view.setAttribute("aria-activedescendant", `row-${this.selected}`);
  }

  row(i, at) {
    const layer = this.layers[i];
    const branch = this.children[i].length > 0;
    const open = branch && (this.words.length > 0 || this.open.has(i));
    const share = this.share(i);
    const trouble = this.troubles.get(i);
    const shape = layer.shape || (layer.shared_with !== null ? "shared" : layer.idle ? "not called" : layer.runs ? "never ran" : "");
    return el(
      "div",
      {
        id: `row-${i}`, class: layer.ran ? "row" : "row quiet", role: "treeitem", "data-layer": i,
        "aria-level": layer.depth + 1, "aria-selected": String(i === this.selected),
        "aria-expanded": branch ? String(open) : null, "aria-label": `${layer.path || "model"}, ${layer.type}, ${shape}`,
        style: { top: `${at * this.height}px` },
      },
      el(
        "span", { class: "label", style: { paddingLeft: `calc(${Math.min(layer.depth, 12)} * var(--indent))` }, title: layer.path },
        el("button", { class: "fold", tabindex: "-1", "aria-hidden": "true" }, branch ? chevron() : ""),
        el("b", {}, ...this.marked(i)),
        trouble ? el("i", { class: trouble === "bad" ? "dot" : "dot mild" }) : "",
      ),
      el("span", { class: "c-type", title: layer.type }, layer.type),
      el("span", { class: "c-shape", title: shape }, shape),
      el("span", { class: "c-dtype", title: layer.dtype || "" }, layer.dtype || ""),
      el("span", { class: "c-params" }, layer.parameters ? format.count(layer.parameters) : ""),
      el(
        "span", { class: "c-time", title: share ? `${format.share(share)} of the model's time` : null },
        share > 0.02 ? el("i", { style: { width: `${share * 100}%` } }) : "",
        format.time(layer.seconds),
      ),
      el("span", { class: "c-memory" }, format.bytes(layer.nbytes)),
    );
  }

  share(i) {
    // Of the model and not of what holds it: the longer bar is the longer time, wherever it stands.
    const whole = this.layers[0].seconds;
    return i && whole ? Math.min(1, (this.layers[i].seconds || 0) / whole) : 0;
  }

  marked(i) {
    const layer = this.layers[i];
    const above = layer.parent >= 0 ? this.layers[layer.parent].path : "";
    const name = layer.path ? layer.path.slice(above ? above.length + 1 : 0) : "(model)";
    if (!this.words.length) return [name];
    const parts = name.split(new RegExp(`(${this.words.map(escaped).join("|")})`, "i"));
    return parts.filter(Boolean).map((part) => (this.words.includes(part.toLowerCase()) ? el("mark", {}, part) : part));
  }

  // -- moving

  select(i, from = "tree") {
    this.selected = i;
    if (!this.visible.includes(i)) {
      for (let above = this.layers[i].parent; above >= 0; above = this.layers[above].parent) this.open.add(above);
      this.refresh();
    }
    this.reveal(i);
    this.draw(true);
    this.onSelect(i, from);
  }

  reveal(i) {
    const top = this.visible.indexOf(i) * this.height;
    const room = this.view.clientHeight;
    const away = Math.max(this.view.scrollTop - top, top + this.height - this.view.scrollTop - room);
    if (away > 3 * this.height) this.view.scrollTop = top - room / 2;
    else if (top < this.view.scrollTop) this.view.scrollTop = top;
    else if (top + this.height > this.view.scrollTop + room) this.view.scrollTop = top + this.height - room;
  }

  fold(i, open) {
    if (open) this.open.add(i);
    else this.open.delete(i);
    this.refresh();
  }

  click(event) {
    const row = event.target.closest(".row");
    if (!row) return;
    const i = Number(row.dataset.layer);
    if (event.target.closest(".fold") && this.children[i].length) this.fold(i, !this.open.has(i));
    else this.select(i, "click");
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const at = this.visible.indexOf(this.selected);
    const page = Math.max(1, Math.floor(this.view.clientHeight / this.height) - 1);
    const branch = this.children[this.selected].length > 0;
    const open = branch && (this.words.length > 0 || this.open.has(this.selected));
    const to = (where) => this.select(this.visible[Math.max(0, Math.min(this.visible.length - 1, where))]);
    const moves = {
      ArrowDown: () => to(at + 1),
      ArrowUp: () => to(at - 1),
      PageDown: () => to(at + page),
      PageUp: () => to(at - page),
      Home: () => to(0),
      End: () => to(this.visible.length - 1),
      ArrowRight: () => (branch && !open ? this.fold(this.selected, true) : branch ? to(at + 1) : null),
      ArrowLeft: () => {
        if (open && !this.words.length) this.fold(this.selected, false);
        else if (this.layers[this.selected].parent >= 0) this.select(this.layers[this.selected].parent);
      },
      Enter: () => this.onSelect(this.selected, "click"),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  // Paper does not unfold: all layers, unless they would fill a book.
  print(all) {
    this.all = all;
    this.refresh();
  }
}

const chevron = () => svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("path", { d: "M3.5 1.5 7 5 3.5 8.5" }));
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
