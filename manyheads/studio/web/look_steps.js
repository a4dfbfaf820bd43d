// A slider over the saved checkpoints of a run. The address has the step of training, a request only its index.

import { element } from "./dom.js";
import { write } from "./state.js";

// the index of a step for a request; the checkpoint that the page begins with needs none
export function stepIndex(steps, number) {
  const index = steps ? steps.numbers.indexOf(Number(number)) : -1;
  return index < 0 || index === steps.initial ? null : index;
}

export class StepSlider {
  // key: the field of the state, whose default is the checkpoint at `initial`
  constructor(steps, key, name, initial = steps?.initial) {
    Object.assign(this, { steps, key, initial });
    this.root = element("label", { class: "steps-slider", hidden: !steps });
    if (!steps) return;
    this.slider = element("input", { type: "range", id: key, min: "0", max: String(steps.numbers.length - 1), step: "1", oninput: () => this.moved() });
    this.output = element("output", {});
    this.root.append(name, this.slider, this.output);
  }

  show(s) {
    if (!this.steps) return;
    const found = this.steps.numbers.indexOf(Number(s[this.key]));
    this.slider.value = found < 0 ? this.initial : found;
    this.showNumber();
  }

  showNumber() {
    const text = `${this.steps.numbers[this.slider.value].toLocaleString("en")} of ${this.steps.numbers.at(-1).toLocaleString("en")}`;
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }

  // a checkpoint is loaded where the slider rests
  moved() {
    this.showNumber();
    clearTimeout(this.moving);
    const index = Number(this.slider.value);
    this.moving = setTimeout(() => write({ [this.key]: index === this.initial ? null : this.steps.numbers[index] }), 60);
  }
}
