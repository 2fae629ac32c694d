"use strict";
// The nearest point of a picture, in words, where the mouse or a finger is.
for (const frame of document.querySelectorAll(".hover")) {
  const points = JSON.parse(frame.querySelector("script").textContent);
  if (!points.length) continue;
  const words = frame.querySelector("output"), dot = frame.querySelector("span");
  const hide = () => { words.hidden = dot.hidden = true; };
  frame.addEventListener("pointermove", event => {
    const box = frame.querySelector("img").getBoundingClientRect();
    const distance = ([x, y]) => Math.hypot(event.clientX - box.left - x * box.width, event.clientY - box.top - y * box.height);
    const near = points.reduce((best, point) => distance(point) < distance(best) ? point : best);
    if (distance(near) > 30) return hide();
    const [x, y, said] = near;
    words.textContent = said;
    words.hidden = dot.hidden = false;
    dot.style.left = `${x * box.width}px`; dot.style.top = `${y * box.height}px`;
    words.style.left = `${Math.min(x * box.width, box.width - words.offsetWidth)}px`;
    words.style.top = `${y * box.height + (y > 0.25 ? -words.offsetHeight - 10 : 14)}px`;
  });
  frame.addEventListener("pointerleave", hide);
}
