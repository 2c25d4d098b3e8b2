"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const made = (name, parent, attributes = {}, text = "") => {
    const element = parent.namespaceURI === SVG ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return parent.appendChild(element);
  };

  // Values under the pointer. One plot at a time is read; its marks and the box of values go with the pointer.
  const box = made("div", document.body, { class: "values", role: "status", hidden: "" });
  let marks = null;

  const said = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e9)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  };

  const nearest = (steps, x) =>
    steps.reduce((best, step, index) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? index : best), 0);

  const leave = () => {
    marks?.remove();
    marks = null;
    box.hidden = true;
  };

  const plotOf = (target) => (target instanceof Element ? target.closest(".plot") : null);

  const read = (plot, wanted, clientX, clientY) => {
    leave();
    const { box: area, x: steps, y: values, series } = JSON.parse(plot.dataset.readout);
    const [left, top, right, bottom] = area;
    const across = (x) => left + ((x - steps[0]) / (steps[1] - steps[0])) * (right - left);
    const down = (y) => bottom - ((y - values[0]) / (values[1] - values[0])) * (bottom - top);
    const found = series.map((each) => nearest(each.x, wanted));
    const all = series.map((each, number) => each.x[found[number]]);
    const at = all[nearest(all, wanted)];
    plot.dataset.at = at;

    const svg = plot.querySelector("svg");
    marks = made("g", svg, { class: "marks" });
    made("line", marks, { x1: across(at), x2: across(at), y1: top, y2: bottom });
    box.replaceChildren();
    const mean = Math.max(...series.map((each) => each.mean_of));
    made("p", box, {}, `step ${said(at)}${mean > 1 ? `, means of up to ${mean}` : ""}`);
    series.forEach((each, number) => {
      const index = found[number];
      const row = made("p", box);
      made("i", row, { class: `c${each.colour}` });
      made("b", row, {}, said(each.y[index]));
      made("span", row, {}, each.x[index] === at ? each.label : `${each.label}, step ${said(each.x[index])}`);
      const height = down(each.y[index]);
      if (height >= top - 1 && height <= bottom + 1)
        made("circle", marks, { cx: across(each.x[index]), cy: height, r: 4, style: `fill: var(--c${each.colour})` });
    });
    box.hidden = false;
    const width = document.documentElement.clientWidth;
    const beside = clientX + 16 + box.offsetWidth > width ? clientX - 16 - box.offsetWidth : clientX + 16;
    box.style.left = `${Math.max(4, beside)}px`;
    box.style.top = `${Math.max(4, clientY - box.offsetHeight - 12)}px`;
  };

  const underPointer = (event) => {
    const plot = plotOf(event.target);
    if (!plot) return leave();
    const { box: area, x: steps } = JSON.parse(plot.dataset.readout);
    const svg = plot.querySelector("svg");
    const place = svg.getBoundingClientRect();
    const x = ((event.clientX - place.left) / place.width) * svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (x - area[0]) / (area[2] - area[0])));
    read(plot, steps[0] + share * (steps[1] - steps[0]), event.clientX, event.clientY);
  };

  const byKey = (event) => {
    const plot = plotOf(event.target);
    if (event.key === "Escape") leave();
    if (!plot || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const { series } = JSON.parse(plot.dataset.readout);
    const all = [...new Set(series.flatMap((each) => each.x))].sort((one, other) => one - other);
    const before = "at" in plot.dataset ? nearest(all, Number(plot.dataset.at)) : -1;
    const index = Math.min(all.length - 1, Math.max(0, before + (event.key === "ArrowRight" ? 1 : -1)));
    const place = plot.getBoundingClientRect();
    read(plot, all[index], place.left + place.width / 2, place.top + place.height / 2);
  };

  addEventListener("pointermove", underPointer);
  addEventListener("pointerdown", underPointer);
  addEventListener("keydown", byKey);
  addEventListener("scroll", leave, { passive: true });
  addEventListener("focusout", leave);
  document.documentElement.addEventListener("pointerleave", leave);

  // The search among samples: every word must occur.
  const search = (field) => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const part = field.closest(".searched");
    const samples = [...part.querySelectorAll(".sample")];
    for (const sample of samples) {
      const texts = [...sample.querySelectorAll(".prompt, .text")].map((part) => part.textContent);
      const text = texts.join("\n").toLowerCase();
      sample.hidden = !words.every((word) => text.includes(word));
    }
    for (const fold of part.querySelectorAll(":scope > details")) fold.open = words.length > 0;
    const left = samples.filter((sample) => !sample.hidden).length;
    part.querySelector("output").textContent = words.length ? `${left} of ${samples.length}` : "";
  };

  for (const part of document.querySelectorAll(".filter")) part.hidden = false;
  addEventListener("input", (event) => {
    if (event.target.matches(".filter input")) search(event.target);
  });

  // The page of a run that goes on loads itself again. What is open and where the reader is stay so; it waits while
  // values are read or samples are searched.
  const seconds = Number(document.body.dataset.reload);
  if (seconds) {
    const key = `proximo ${location.pathname}`;
    const folds = [...document.querySelectorAll("details")];
    const kept = JSON.parse(sessionStorage.getItem(key) ?? "null");
    folds.forEach((fold, number) => (fold.open = kept?.open[number] ?? fold.open));
    if (kept) scrollTo(0, kept.top);
    const isRead = () => !box.hidden || [...document.querySelectorAll(".filter input")].some((field) => field.value);
    setInterval(() => {
      if (document.hidden || isRead()) return;
      sessionStorage.setItem(key, JSON.stringify({ open: folds.map((fold) => fold.open), top: scrollY }));
      location.reload();
    }, 1000 * seconds);
  }
})();
