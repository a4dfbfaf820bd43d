// What a model looks like and costs: the drawing, the figures with their change since the start, and the steps of a walk.

import { element } from "./dom.js";

/** Adds the style of drawings to the page, which allows no inline styles. */
export function adoptStyle(text) {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(text);
  document.adoptedStyleSheets = [sheet];
}

/** Shows an SVG of the server. */
export function showDrawing(root, svg) {
  const parsed = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  root.replaceChildren(document.importNode(parsed, true));
}

export function count(value) {
  return value.toLocaleString("en");
}

/** A number with a prefix of its size, such as 1.24 G. */
export function short(value, base = 1000) {
  const units = base === 1024 ? ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] : ["", "k", "M", "G", "T", "P", "E"];
  let index = 0;
  while (Math.abs(value) >= base && index < units.length - 1) {
    value /= base;
    index += 1;
  }
  return `${index ? value.toPrecision(3) : value} ${units[index]}`.trim();
}

function difference(now, start, format) {
  if (now === null || start === null || now === start) return element("td", { class: "number" }, now === start ? "" : "new");
  const more = now > start;
  const share = start ? ` (${more ? "+" : "−"}${Math.abs((100 * (now - start)) / start).toFixed(1)} %)` : "";
  return element("td", { class: `number ${more ? "model-more" : "model-less"}` }, `${more ? "+" : "−"}${format(Math.abs(now - start))}${share}`);
}

function row(name, now, start, format) {
  return element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number" }, now === null ? "none" : format(now)), difference(now, start, format));
}

/** The rows of numbers of parameters, which are known at once. */
export function parameterRows(shown) {
  const heading = (text) => element("th", { class: "number", scope: "col" }, text);
  return [element("tr", {}, element("td"), heading("now"), heading("since the start")), row("Parameters", shown.parameters, shown.parameters_at_start, count)];
}

/** The rows of costs; `start` is the model without changes, or null if it has no such length. */
export function costRows(now, start) {
  const bytes = (value) => short(value, 1024);
  const figures = [
    ["FLOPs of a forward pass", (costs) => costs.flops.forward, short],
    ["Weights (float32)", (costs) => costs.memory.weights, bytes],
    ["Activations kept for the backward pass", (costs) => costs.memory.activations, bytes],
    ["Training with Adam", (costs) => costs.memory.training, bytes],
    ["Cache after the last token", (costs) => costs.memory.cache, bytes],
  ];
  const { batch, length, source_length: source } = now.flops;
  const heading = `of ${batch} × ${length} tokens${source ? ` and sources of ${source}` : ""}${start ? "" : ", which the model at the start has no positions for"}`;
  return [
    element("tr", {}, element("th", { colspan: "3", class: "batch" }, heading)),
    ...figures.map(([name, get, format]) => row(name, get(now), start ? get(start) : get(now), format)),
  ];
}

export function partRows(shown) {
  return Object.entries(shown.parameters_by_part).map(([part, value]) =>
    element("tr", {}, element("th", { scope: "row" }, part), element("td", { class: "number" }, count(value)), element("td", { class: "number" }, `${((100 * value) / shown.parameters).toFixed(1)} %`)),
  );
}

export function weightRows(shown) {
  return shown.weights.map((weight) =>
    element("tr", {}, element("th", { scope: "row" }, weight.name), element("td", { class: "number" }, weight.shape.join(" × ")), element("td", { class: "number" }, weight.count > 1 ? `${weight.count} times` : "")),
  );
}

/** The steps of a walk; those up to `current` are taken. */
export function stepItems(steps, current, go) {
  const item = (number, heading, ...children) =>
    element("li", { class: `model-step${number <= current ? " done" : ""}`, "aria-current": number === current ? "step" : null },
      element("button", { type: "button", id: `model-step-${number}`, onclick: () => go(number) }, `${number}. ${heading}`), ...children);
  const formula = (text) => (text ? element("p", { class: "formula" }, text) : null);
  return [
    item(0, "the start"),
    ...steps.map((step, index) =>
      item(index + 1, step.changes.map((change) => change.path).join(", "),
        ...step.changes.map((change) =>
          element("div", { class: "change" }, element("code", {}, `${change.path}: ${change.before} → ${change.after}`),
            ...(change.before_formula === change.after_formula
              ? [formula(change.meaning)]
              : [formula(change.before_formula && `before: ${change.before_formula}`), formula(change.after_formula && `after: ${change.after_formula}`)])))),
    ),
  ];
}
