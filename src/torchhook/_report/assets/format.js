// Elements and numbers.

const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, f] of Object.entries(value)) made.addEventListener(event, f);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
};

const svg = (tag, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

const format = {
  number(x) {
    if (x === null || x === undefined) return "–";
    if (x === 0) return "0";
    const size = Math.abs(x);
    const text = size >= 1e5 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
    return text.replaceAll("-", "−");
  },
  count(x) {
    for (const [unit, of] of [["G", 1e9], ["M", 1e6], ["K", 1e3]]) {
      if (x >= of) return `${(x / of).toFixed(x / of < 10 ? 2 : 1)} ${unit}`;
    }
    return String(x);
  },
  whole: (x) => x.toLocaleString("en"),
  bytes(x) {
    if (x === null || x === undefined) return "";
    let unit = 0;
    while (x >= 1024 && unit < 4) { x /= 1024; unit += 1; }
    return `${unit && x < 100 ? x.toFixed(1) : Math.round(x)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  },
  // One unit on the whole page, the model's own, so that times can be compared at a glance and read the same everywhere.
  inSeconds: false,
  time(s) {
    if (s === null || s === undefined) return "";
    const [x, unit] = format.inSeconds ? [s, "s"] : [s * 1e3, "ms"];
    return x > 0 && x < 0.005 ? `< 0.01 ${unit}` : `${x.toFixed(2)} ${unit}`;
  },
  share(x) {
    if (x === 0 || x === 1) return `${x * 100} %`;
    // Nearly none and nearly all are not none and all.
    if (x < 0.001 || x > 0.999) return x < 0.5 ? "< 0.1 %" : "> 99.9 %";
    return `${(x * 100).toFixed(x > 0.0995 && x < 0.995 ? 0 : 1)} %`;
  },
};
