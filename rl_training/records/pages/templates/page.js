"use strict";
// Draws the charts in sight first, and the others while the page is idle. Curves can be hidden; the step that is pointed
// at is shown in all charts over steps.
// A canvas does not know the page's colour of text.
const colored = text => JSON.parse(text.replaceAll('"currentColor"', JSON.stringify(getComputedStyle(document.body).color)));
const config = colored(document.getElementById("config").textContent);
const figures = [...document.querySelectorAll("figure.chart")];
const views = new Map();

function rows(parts) {
  return parts.flatMap(part => part.x.map((_, n) => {
    const row = {};
    for (const [name, value] of Object.entries(part)) row[name] = Array.isArray(value) ? value[n] : value;
    return row;
  }));
}

async function draw(figure) {
  if (views.has(figure)) return;
  views.set(figure, null);
  const { spec, data } = colored(figure.querySelector("script").textContent);
  const box = figure.querySelector(".drawing");
  const { view } = await vegaEmbed(box, { ...spec, width: "container", autosize: { type: "fit-x", contains: "padding" }, background: null, config,
    datasets: { rows: rows(data) } }, { mode: "vega-lite", actions: false, logLevel: 1, renderer: "canvas", tooltip: { theme: "custom" } });
  views.set(figure, view);
  choose(figure);
  box.setAttribute("role", "img");
  if (figure.dataset.steps) view.addSignalListener("hover", (_, chosen) => {
    const step = chosen && chosen.x ? chosen.x[0] : null;
    for (const [other, drawn] of views) if (drawn && other !== figure && other.dataset.steps) drawn.signal("pointed", step).runAsync();
  });
}

function choose(figure) {
  const view = views.get(figure), boxes = [...figure.querySelectorAll("input")];
  if (view && boxes.length) view.signal("hidden", boxes.filter(box => !box.checked).map(box => box.value)).runAsync();
}

const seen = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) { draw(entry.target); seen.unobserve(entry.target); }
}, { rootMargin: "400px" });
for (const figure of figures) {
  seen.observe(figure);
  figure.addEventListener("change", () => choose(figure));
}
// A print does not wait for what is only begun when it starts.
(async () => {
  for (const figure of figures) {
    await new Promise(done => (globalThis.requestIdleCallback || setTimeout)(done));
    if (figure.offsetWidth) await draw(figure);
  }
})();
