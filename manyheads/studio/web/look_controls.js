// The controls of the tab Look: each writes one field of the state, and shows it.

import { element } from "./dom.js";
import { write } from "./state.js";

export const MODES = {
  head: "this head", mean: "mean of the layer", max: "maximum of the layer", "all-mean": "mean of all layers", "all-max": "maximum of all layers",
  rollout: "rollout",
};
export const VIEWS = { matrix: "matrix", lines: "lines" };
export const ISOLATES = { "": "nothing", row: "row", column: "column" };
export const GAINS = { 1: "× 1", 10: "× 10", 100: "× 100", 1000: "× 1,000" };
export const SORTS = { layer: "layer", entropy: "entropy", distance: "distance", effect: "effect" };

export const button = (text, hint, onclick) => element("button", { type: "button", title: hint, onclick }, text);

// a list; the first option is the default, which the address leaves out
export function select(name, options, key) {
  const control = element("select", { id: `look-${key}`, onchange: () => write({ [key]: control.value === Object.keys(options)[0] ? null : control.value }) },
    ...Object.entries(options).map(([value, text]) => element("option", { value }, text)));
  return { control, root: element("label", {}, name, control) };
}

export function check(name, key) {
  const control = element("input", { type: "checkbox", id: `look-${key}`, onchange: () => write({ [key]: control.checked ? "1" : null }) });
  return { control, root: element("label", { class: "check" }, control, name) };
}

// a slider; `initial` is left out of the address
export function range(key, attributes, initial = null) {
  const control = element("input", {
    type: "range", id: key, ...attributes, oninput: () => write({ [key]: control.value === initial ? null : control.value }),
  });
  return control;
}

// the row of controls above the matrix
export class Controls {
  constructor(comparisons) {
    this.mode = select("show", MODES, "mode");
    this.view = select("as", VIEWS, "view");
    this.isolate = select("isolate", ISOLATES, "isolate");
    this.gain = select("brightness", GAINS, "gain");
    this.compare = select("compare with", comparisons, "compare");
    this.mass = range("mass", { min: "0.5", max: "1", step: "0.01", "aria-label": "Share of each row's weight that is shown" }, "1");
    this.massText = element("output", {});
    this.special = check("hide special tokens", "special");
    this.merge = check("merge subwords", "merge");
    this.difference = check("difference", "difference");
    this.root = element("div", { class: "bar controls" }, this.mode.root, this.view.root, this.isolate.root, this.gain.root, this.compare.root,
      element("label", {}, "mass", this.mass, this.massText), this.special.root, this.merge.root, this.difference.root);
  }

  show(s) {
    for (const name of ["mode", "view", "isolate", "gain", "compare"]) this[name].control.value = s[name];
    for (const name of ["special", "merge", "difference"]) this[name].control.checked = Boolean(s[name]);
    this.mass.value = s.mass;
    this.massText.textContent = `${Math.round(s.mass * 100)} %`;
    this.difference.root.hidden = s.compare === "none";
  }

  // a matrix that comes in tiles cannot be regrouped, and two of different shape have no difference
  enable({ whole, comparable }) {
    for (const control of [this.special.control, this.merge.control, this.mass]) control.disabled = !whole;
    this.difference.control.disabled = !comparable;
  }
}
