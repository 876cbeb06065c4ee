// The page: data in, tree and details out, theme, search, addresses, print.

const page = JSON.parse(document.getElementById("data").textContent);
format.inSeconds = Math.max(page.times?.plain ?? 0, page.times?.clocked ?? 0) >= 10;
let lines = null;
const layerAt = (i) => {
  lines ??= document.getElementById("details").textContent.split("\n");
  return JSON.parse(lines[i]);
};

const troubles = new Map();
for (const finding of page.findings) {
  for (const [i] of finding.layers) {
    if (["nan", "silent"].includes(finding.kind)) troubles.set(i, "bad");
    else if (!troubles.has(i)) troubles.set(i, "mild");
  }
}

const search = document.getElementById("search");
const status = document.getElementById("status");
const counted = (n) => `${format.whole(n)} ${n === 1 ? "layer" : "layers"}`;
const detail = new Detail(page, layerAt, (i) => tree.select(i, "click"));
const tree = new Tree(page.layers, troubles, (i, from) => {
  detail.show(i);
  const address = i ? `#${encodeURIComponent(page.layers[i].path)}` : "#";
  // Inside a notebook the page has no address of its own, and browsers refuse to change it.
  const own = location.protocol !== "about:";
  if (own && decodeURIComponent(location.hash) !== decodeURIComponent(address)) history.replaceState(null, "", address);
  if (from === "click" && matchMedia("(max-width: 860px)").matches) detail.view.scrollIntoView({ block: "start" });
});

const find = () => {
  const found = tree.search(search.value);
  status.textContent = search.value.trim() ? `${counted(found)} found` : counted(page.layers.length - 1);
};
search.addEventListener("input", find);
search.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { search.value = ""; find(); tree.view.focus(); }
  if (event.key === "ArrowDown" || event.key === "Enter") {
    event.preventDefault();
    tree.view.focus();
    if (tree.hits?.length) tree.select(tree.hits[0]);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target instanceof HTMLInputElement) return;
  event.preventDefault();
  search.focus();
  search.select();
});

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

addEventListener("beforeprint", () => { tree.print(true); document.querySelectorAll("details").forEach((d) => { d.open = true; }); });
addEventListener("afterprint", () => tree.print(false));
const fromAddress = () => {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const i = page.layers.findIndex((layer) => layer.path === wanted);
  if (i !== tree.selected && i >= 0) tree.select(i);
};
addEventListener("hashchange", fromAddress);

find();
detail.show(0);
fromAddress();
tree.view.focus({ preventScroll: true });
document.documentElement.dataset.ready = "true";
