"use strict";
// Draws the matrix of pairs, shows the pair that is pointed at, and draws how cosines are distributed.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id), E = D.evaluation, U = D.update;
const num = (x, digits = 3) => x === null || x === undefined ? "–" : x !== 0 && Math.abs(x) < 1e-3 ? Number(x).toExponential(digits - 1) : Number(x).toPrecision(digits);
// A cell's colour is the signed square root of its share of the largest: heavy tails do not blind it.
const largest = {cosine: 1, contribution: Math.max(...D.contribution.flat().map(Math.abs), 1e-30)};
function colour(share) {
  const s = Math.sign(share) * Math.sqrt(Math.min(Math.abs(share), 1)), f = 1 - Math.abs(s);
  return s >= 0 ? [255 - 75 * s, 255 * f + 20 * s, 255 * f + 40 * s] : [255 * f + 30 * -s, 255 * f + 90 * -s, 255 + 80 * s];
}
const size = Math.max(2, Math.min(16, Math.floor(640 / Math.max(E.length, U.length)))), map = $("map");
map.width = size * U.length; map.height = size * E.length;
let rows = [], columns = [], kept = false;
function draw() {
  const what = $("what").value, key = $("order").value;
  [rows, columns] = [D.order[key].evaluation, D.order[key].update];
  const context = map.getContext("2d"), picture = context.createImageData(map.width, map.height);
  for (let y = 0; y < map.height; y++) for (let x = 0; x < map.width; x++) {
    const value = D[what][rows[Math.floor(y / size)]][columns[Math.floor(x / size)]];
    const rgb = value === null ? [221, 221, 221] : colour(value / largest[what]);
    picture.data.set([...rgb, 255], 4 * (y * map.width + x));
  }
  context.putImageData(picture, 0, 0);
  const [bar, ticks] = $("scale").children, scale = bar.getContext("2d");
  for (let x = 0; x < 256; x++) { scale.fillStyle = `rgb(${colour(signed(2 * x / 255 - 1)).map(Math.round)})`; scale.fillRect(x, 0, 1, 12); }
  ticks.replaceChildren(...[-1, -0.25, 0, 0.25, 1].map(share => {
    const tick = element("span", num(share * largest[what], 2));
    tick.style.left = `${50 + 50 * Math.sign(share) * Math.sqrt(Math.abs(share))}%`;
    return tick;
  }));
}
const signed = place => place * Math.abs(place);  // the share of the largest value at a place of the colour scale
function element(tag, text, name) { const e = document.createElement(tag); e.textContent = text; if (name) e.className = name; return e; }
function sequence(title, s) {
  const advantage = s.advantage === null ? "" : `, advantage ${num(s.advantage)}`;
  return [element("b", `${title} ${s.row}: reward ${num(s.reward)}${advantage}, ${s.tokens} tokens, log π ${num(s.logp, 4)}`),
          element("pre", s.prompt + s.response)];
}
function show(event) {
  if (kept && event.type !== "click") return;
  const box = map.getBoundingClientRect();
  const i = rows[Math.floor((event.clientY - box.top) / box.height * E.length)];
  const j = columns[Math.floor((event.clientX - box.left) / box.width * U.length)];
  if (i === undefined || j === undefined) return;
  $("cell").replaceChildren(element("p", `cosine ${num(D.cosine[i][j])} · contribution ${num(D.contribution[i][j])} nats per token · ${D.kinds[D.kind[i][j]]}`),
    ...sequence("evaluation", E[i]), ...sequence("update", U[j]));
}
map.addEventListener("pointermove", show);
map.addEventListener("click", event => { kept = !kept; show(event); });
for (const id of ["what", "order"]) $(id).addEventListener("change", draw);
for (const [name, counts] of Object.entries(D.histograms)) {
  const box = document.createElement("div"), bars = document.createElement("canvas"); bars.width = 240; bars.height = 90;
  const context = bars.getContext("2d"), top = Math.max(...counts, 1), width = 240 / counts.length;
  counts.forEach((c, k) => { context.fillStyle = "#4a78b0"; context.fillRect(k * width, 90 - 84 * c / top, width - 1, 84 * c / top); });
  context.fillStyle = "#999"; context.fillRect(120, 0, 1, 90);
  box.append(element("div", `${name} (${counts.reduce((a, b) => a + b, 0)})`), bars, element("div", "−1 … 1", "below")); $("distributions").append(box);
}
draw();
