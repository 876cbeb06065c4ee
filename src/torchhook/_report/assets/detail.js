// What is shown of one layer, and of the whole run.

class Detail {
  constructor(page, layerAt, go) {
    this.page = page;
    this.layerAt = layerAt;
    this.go = go;
    this.view = document.getElementById("detail");
  }

  show(i) {
    this.view.replaceChildren(...(i === 0 ? this.overview() : []), ...this.layer(i));
    this.view.scrollTop = 0;
  }

  // -- one layer

  layer(i) {
    const layer = this.layerAt(i);
    const cut = layer.path.lastIndexOf(".") + 1;
    const head = i === 0
      ? [el("section", {}, el("h3", {}, "The model's output"))]
      : [
        el("h2", { class: "title" }, el("span", { class: "above" }, layer.path.slice(0, cut)), layer.path.slice(cut)),
        el("p", { class: "kind" }, layer.type, " ", layer.settings ? el("code", {}, `(${oneLine(layer.settings)})`) : ""),
      ];
    const shared = layer.shared_with;
    if (shared !== null) {
      head.push(el("p", { class: "note" }, "The same module as ", this.link(shared, this.page.layers[shared].path), "."));
      return head;
    }
    if (!layer.runs) head.push(el("p", { class: "note" }, "It holds other layers, and is never called itself."));
    if (layer.idle) head.push(el("p", { class: "note" }, el("b", {}, "Not called: "), layer.idle));
    if (layer.silent) head.push(el("p", { class: "alert" }, el("b", {}, "Never ran. "), layer.silent));
    const body = el("div");
    head.push(body);
    const choose = (n) => body.replaceChildren(...this.call(layer, i, n, choose));
    choose(0);
    if (layer.weights.length) head.push(weights(layer));
    return head;
  }

  call(layer, i, n, choose) {
    const call = layer.calls[n];
    const facts = {
      output: call ? call.shape : null,
      dtype: call ? call.dtype : null,
      device: call ? call.device : null,
      parameters: layer.parameters ? format.whole(layer.parameters) : null,
      time: layer.seconds === null ? null : format.time(layer.seconds) + this.share(layer),
      "own time": this.holds(i) && layer.own !== null ? format.time(layer.own) : null,
      memory: call ? format.bytes(call.nbytes) : null,
      calls: layer.ran > 1 ? String(layer.ran) : null,
      "dead channels": call && call.value && call.value.dead ? `${format.whole(call.value.dead)} of ${format.whole(call.value.channels)}` : null,
    };
    const made = [i === 0 ? "" : list("facts", facts)];
    if (layer.calls.length > 1) {
      const tab = (_, at) => el("button", { type: "button", "aria-pressed": String(at === n), on: { click: () => choose(at) } }, `call ${at}`);
      made.push(el("div", { class: "tabs" }, ...layer.calls.map(tab)));
    }
    if (!call) return made.filter(Boolean);
    const value = call.value;
    if (value && (value.nans || value.infs)) {
      made.push(el("p", { class: "alert" }, el("b", {}, "Not finite. "), `${format.whole(value.nans)} NaN and ${format.whole(value.infs)} Inf among ${format.whole(value.elements)} values.`));
    }
    if (value && value.dead && this.found("dead", i)) {
      made.push(el("p", { class: "alert mild" }, el("b", {}, "Dead channels. "), `${format.whole(value.dead)} of ${format.whole(value.channels)} are zero everywhere on this input.`));
    }
    const spreads = [
      value ? spread("Values", value, call.leaf ? `of part ${call.leaf}` : "", "") : "",
      call.gradient ? spread("Gradient", call.gradient, "of the score", "grad") : "",
    ].filter(Boolean);
    if (spreads.length) made.push(el("section", { class: "two" }, ...spreads));
    if (call.maps) made.push(tiles(call.maps));
    call.attention.forEach((sprite) => made.push(attention(sprite, this.page.tokens)));
    return made.filter(Boolean);
  }

  found(kind, i) {
    return this.page.findings.some((finding) => finding.kind === kind && finding.layers.some(([at]) => at === i));
  }

  holds(i) {
    return this.page.layers.some((layer) => layer.parent === i);
  }

  share(layer) {
    const whole = this.page.layers[0].seconds;
    return whole && layer.path ? ` (${format.share(layer.seconds / whole)})` : "";
  }

  link(i, text) {
    return el("a", { href: `#${encodeURIComponent(text)}`, style: { color: "var(--accent)" }, on: { click: (event) => { event.preventDefault(); this.go(i); } } }, text);
  }

  // -- the whole run

  overview() {
    const page = this.page;
    const made = [el("h2", { class: "title plain" }, "Overview")];
    if (page.banner) made.push(el("p", { class: "alert banner", role: "note" }, page.banner));
    const left = [];
    const right = [];
    if (page.picture) left.push(picture(page.picture));
    if (page.tokens.length) {
      const where = page.picture ? right : left;
      where.push(el("h3", {}, "Input", el("small", {}, page.tokens.some((t) => t.weight) ? "shaded by how much the score depends on it" : "")), tokens(page.tokens));
    }
    if (page.classes.length) right.push(el("h3", {}, "Output", el("small", {}, page.choices)), likely(page.classes));
    right.push(list("facts wide", { input: page.input, output: page.output, "gradients of": page.score }));
    if (left.length && page.picture) made.push(el("div", { class: "look" }, el("div", {}, ...left), el("div", {}, ...right)));
    else made.push(el("section", {}, ...left), el("section", {}, ...right));
    made.push(el("section", {}, el("h3", {}, "Findings"), ...this.findings()));
    const chart = this.times();
    if (chart) made.push(chart);
    made.push(el("section", {}, el("h3", {}, "About"), list("facts wide", Object.fromEntries(page.about))));
    page.notes.forEach((note) => made.push(el("p", { class: "note" }, note)));
    return made;
  }

  findings() {
    if (!this.page.findings.length) return [el("p", { class: "fine" }, this.page.layers.some((layer) => layer.idle)
      ? "Nothing: every value is finite, and every layer ran, but for those whose call would change nothing."
      : "Nothing: every layer ran, and every value is finite.")];
    return this.page.findings.map((finding) => {
      const inside = el("div", { class: "found" });
      const fill = () => {
        if (inside.childElementCount) return;
        const line = ([i, note]) => el(
          "button", { type: "button", class: note.length > 40 ? "long" : null, on: { click: () => this.go(i) } },
          el("code", {}, this.page.layers[i].path || "(model)"), el("span", {}, note),
        );
        inside.append(el("p", {}, finding.advice), ...finding.layers.map(line));
      };
      const count = finding.layers.length;
      return el(
        "details", { class: "finding", "data-kind": finding.kind, on: { toggle: fill } },
        el("summary", {}, el("b", {}, finding.title), el("span", {}, `${format.whole(count)} ${count === 1 ? "layer" : "layers"}`)),
        inside,
      );
    });
  }

  times() {
    const layers = this.page.layers;
    // A layer that holds others computes too: each has the time that is its own. A shared one has it once.
    const shown = layers.map((_, i) => i).filter((i) => layers[i].own && layers[i].shared_with === null);
    if (shown.length < 3) return null;
    const slowest = shown.reduce((best, i) => (layers[i].own > layers[best].own ? i : best));
    const chart = svg("svg", { class: "chart", viewBox: `0 0 ${shown.length} 100`, preserveAspectRatio: "none", role: "img", "aria-label": "Own time of each layer" });
    const wide = shown.length > 150 ? 1 : 0.8;
    const name = (i) => layers[i].path || "(model)";
    shown.forEach((i, at) => {
      const high = (layers[i].own / layers[slowest].own) * 100;
      const bar = svg("rect", { x: at, y: 100 - high, width: wide, height: high }, svg("title"));
      bar.firstChild.textContent = `${name(i)}: ${format.time(layers[i].own)}`;
      bar.addEventListener("click", () => this.go(i));
      chart.append(bar);
    });
    return el(
      "section", {},
      el("h3", {}, "Time", el("small", {}, `of ${shown.length} layers, each without the layers in it, first to last; the slowest is ${name(slowest)} with ${format.time(layers[slowest].own)}`)),
      el("div", { class: "card" }, chart), this.account(),
    );
  }

  // Where the time went, all of it.
  account() {
    const { plain, clocked, own } = this.page.times || {};
    if (!clocked) return "";
    return el("p", { class: "note" }, `A plain forward pass takes ${format.time(plain)}. With a clock at every layer it took ${format.time(clocked)}, ${format.time(own)} of it in layers that hold no others. The other ${format.time(Math.max(0, clocked - own))} are what layers with others in them do themselves: their own operations, Python, and the clocks.`);
  }
}

// -- pieces

const oneLine = (text) => text.replace(/\s+/g, " ");

function list(kind, facts) {
  const shown = Object.entries(facts).filter(([, value]) => value !== null && value !== "" && value !== undefined);
  return el("dl", { class: kind }, ...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function spread(title, numbers, small, kind) {
  const most = Math.max(1, ...numbers.counts);
  const plot = svg("svg", { viewBox: `0 0 ${numbers.counts.length || 1} 100`, preserveAspectRatio: "none", role: "img", "aria-label": `Histogram: ${title}` });
  numbers.counts.forEach((count, at) => {
    const high = (count / most) * 100;
    plot.append(svg("rect", { x: at + 0.04, y: 100 - high, width: 0.92, height: high }));
  });
  if (numbers.low < 0 && numbers.high > 0) {
    const zero = (-numbers.low / (numbers.high - numbers.low)) * numbers.counts.length;
    plot.append(svg("line", { x1: zero, x2: zero, y1: 0, y2: 100 }));
  }
  const table = {
    mean: format.number(numbers.mean), std: format.number(numbers.std), norm: format.number(numbers.norm),
    min: format.number(numbers.min), max: format.number(numbers.max), zeros: format.share(numbers.zeros),
  };
  const made = list("numbers", table);
  if (numbers.nans) made.append(el("div", { class: "bad" }, el("dt", {}, "NaN"), el("dd", {}, format.whole(numbers.nans))));
  if (numbers.infs) made.append(el("div", { class: "bad" }, el("dt", {}, "Inf"), el("dd", {}, format.whole(numbers.infs))));
  return el(
    "div", { class: `card spread ${kind}` },
    el("h3", {}, title, el("small", {}, [small, numbers.without_zeros ? "zeros left out" : ""].filter(Boolean).join(", "))),
    numbers.counts.length ? plot : "",
    numbers.counts.length ? el("div", { class: "axis" }, el("span", {}, format.number(numbers.low)), el("span", {}, format.number(numbers.high))) : "",
    made,
  );
}

function tiles(sprite, wanted = 76) {
  const head = el("h3", {}, sprite.title, el("small", {}, sprite.what));
  if (sprite.labels.length === 1) {
    const high = Math.max(24, Math.min(260, sprite.height * 4));
    return el("section", {}, head, el("img", { class: "matrix", src: sprite.uri, alt: sprite.what, style: { height: `${high}px` } }));
  }
  const scale = wanted / Math.max(sprite.width, sprite.height);
  const [wide, high] = [sprite.width * scale, sprite.height * scale];
  const rows = Math.ceil(sprite.labels.length / sprite.columns);
  const tile = (label, at) => el(
    "figure", { style: { width: `${Math.max(wide, 64)}px` } },
    el("span", {
      class: "tile", role: "img", "aria-label": label,
      style: {
        width: `${wide}px`, height: `${high}px`, backgroundImage: `url(${sprite.uri})`,
        backgroundSize: `${wide * sprite.columns}px ${high * rows}px`,
        backgroundPosition: `${-wide * (at % sprite.columns)}px ${-high * Math.floor(at / sprite.columns)}px`,
      },
    }),
    el("figcaption", {}, label),
  );
  return el("section", {}, head, el("div", { class: "tiles" }, ...sprite.labels.map(tile)));
}

// Heads side by side; where a map has one pixel for each pair of tokens, one of them large, with the tokens at its sides.
function attention(sprite, tokens) {
  const section = tiles(sprite, 104);
  if (sprite.width !== tokens.length || sprite.height !== tokens.length) return section;
  named(section, sprite, tokens);
  const figures = [...section.querySelectorAll("figure")];
  const cell = Math.max(10, Math.min(26, Math.floor(360 / tokens.length)));
  const side = cell * tokens.length;
  const rows = Math.ceil(sprite.labels.length / sprite.columns);
  const large = el("span", { class: "tile", role: "img" });
  const title = el("span", { class: "which" });
  const choose = (at) => {
    figures.forEach((figure, other) => figure.setAttribute("aria-pressed", String(other === at)));
    title.textContent = sprite.labels[at];
    large.setAttribute("aria-label", `Attention, ${sprite.labels[at]}`);
    Object.assign(large.style, {
      width: `${side}px`, height: `${side}px`, backgroundImage: `url(${sprite.uri})`,
      backgroundSize: `${side * sprite.columns}px ${side * rows}px`,
      backgroundPosition: `${-side * (at % sprite.columns)}px ${-side * Math.floor(at / sprite.columns)}px`,
    });
  };
  figures.forEach((figure, at) => {
    figure.setAttribute("role", "button");
    figure.setAttribute("tabindex", "0");
    figure.addEventListener("click", () => choose(at));
    figure.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(at); } });
  });
  // Of many tokens some: below ten pixels nobody reads them.
  const names = (kind) => el("span", { class: kind }, ...tokens.map((token) => el("i", { title: token.text, style: { [kind === "down" ? "height" : "width"]: `${cell}px` } }, el("span", {}, token.text))));
  const map = el("div", { class: "labelled", style: { fontSize: `${Math.min(11, cell)}px` } }, title, names("down"), large, el("span", { class: "axes" }, "query ↓ key →"), names("across"));
  section.querySelector(".tiles").before(map);
  choose(0);
  return section;
}

// Say which tokens the pointer is on.
function named(section, sprite, tokens) {
  section.querySelectorAll("figure").forEach((figure, at) => {
    const [tile, caption] = figure.children;
    tile.addEventListener("mousemove", (event) => {
      const box = tile.getBoundingClientRect();
      const index = (x, size) => Math.min(tokens.length - 1, Math.max(0, Math.floor((x / size) * tokens.length)));
      const [query, key] = [index(event.clientY - box.top, box.height), index(event.clientX - box.left, box.width)];
      caption.textContent = `${tokens[query].text} → ${tokens[key].text}`;
    });
    tile.addEventListener("mouseleave", () => { caption.textContent = sprite.labels[at]; });
  });
}

function weights(layer) {
  const line = (w) => el(
    "tr", {}, el("td", { class: "mono" }, w.name), el("td", { class: "mono" }, w.shape), el("td", {}, w.dtype + (w.trainable ? "" : ", fixed")),
    el("td", { class: "r" }, format.number(w.rms)), el("td", { class: "r" }, format.number(w.gradient)),
  );
  const head = ["name", "shape", "dtype"].map((text) => el("th", {}, text)).concat(["rms", "gradient rms"].map((text) => el("th", { class: "r" }, text)));
  return el("section", {}, el("h3", {}, "Weights"), el("table", { class: "list" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...layer.weights.map(line))));
}

function picture(found) {
  const stack = el("div", { class: "stack" }, el("img", { src: found.uri, width: found.width, height: found.height, alt: "The input" }));
  if (!found.overlay) return stack;
  const start = 60;
  const over = el("img", { class: "over", src: found.overlay, alt: found.caption, style: { opacity: start / 100 } });
  const shown = el("output", { for: "opacity" }, `${start} %`);
  const move = (event) => { over.style.opacity = event.target.value / 100; shown.textContent = `${event.target.value} %`; };
  stack.append(over);
  return el(
    "div", {}, stack,
    el("label", { class: "slider" }, "Map", el("input", { id: "opacity", type: "range", min: 0, max: 100, value: start, "aria-label": "Opacity of the map", on: { input: move } }), shown),
    el("p", { class: "note", style: { marginTop: "4px" } }, found.caption),
  );
}

function tokens(found) {
  const chip = (token) => {
    const strength = token.weight ? `color-mix(in srgb, var(--grad-bar) ${Math.round(token.weight * 100)}%, transparent)` : null;
    return el("span", { style: strength ? { background: strength } : {}, title: token.weight === null ? null : format.number(token.weight) }, token.text);
  };
  return el("div", { class: "tokens" }, ...found.map(chip));
}

function likely(classes) {
  const line = ([name, share]) => el(
    "div", {}, el("div", { class: "line" }, el("span", {}, name), el("span", {}, format.share(share))),
    el("div", { class: "track" }, el("i", { style: { width: `${share * 100}%` } })),
  );
  return el("div", { class: "likely" }, ...classes.map(line));
}
