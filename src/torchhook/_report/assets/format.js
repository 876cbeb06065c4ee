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
  time(s) {
    if (s === null || s === undefined) return "";
    if (s >= 1) return `${s.toFixed(2)} s`;
    if (s >= 1e-3) return `${(s * 1e3).toFixed(s < 1e-1 ? 2 : 0)} ms`;
    return `${Math.round(s * 1e6)} µs`;
  },
  share: (x) => (x === 0 ? "0 %" : x < 0.001 ? "< 0.1 %" : `${(x * 100).toFixed(x > 0.0995 ? 0 : 1)} %`),
};
