// What the model reads: the text, the target of an encoder–decoder, examples, and a continuation by generated tokens.

import { isOffline, post } from "./api.js";
import { label } from "./canvas.js";
import { element, status } from "./dom.js";
import { button } from "./look_controls.js";
import { checkpointOf } from "./look_state.js";
import { StepSlider } from "./look_steps.js";
import { write } from "./state.js";

const NEW_TEXT = { add: null, row: null, column: null, position: null };
const LABELS = { text: "Text", ids: "Token ids, as numbers", image: "Pixels from 0 to 1, as numbers" };

export class InputPanel {
  constructor(look) {
    this.look = look;
    const { has_source: isPair, reads, examples } = look.info.checkpoints[0];
    this.text = element("textarea", {
      id: "text", rows: "2", spellcheck: "false", "aria-label": isPair && reads === "text" ? "Source text" : LABELS[reads], disabled: isOffline,
      oninput: () => this.typed(),
    });
    this.examples = element("select", { "aria-label": "Examples", disabled: isOffline, onchange: () => this.choose(this.examples.value) },
      element("option", { value: "" }, "examples"), ...examples.map((example) => element("option", { value: example }, label(example, 60))));
    this.generateButton = button("Generate", "Continue greedily for 16 tokens", () => this.generate(0));
    this.sampleButton = button("Sample", "Continue with 16 tokens drawn at the temperature of the slider", () => this.generate(look.state.temperature));
    this.clearButton = button("Clear", "Remove the tokens that were appended", () => write({ add: null, row: null, column: null }));
    this.target = element("textarea", { id: "target", rows: "1", spellcheck: "false", disabled: isOffline, oninput: () => this.typed() });
    this.targetField = element("label", { hidden: !isPair || reads === "image" }, "target", this.target);
    this.steps = new StepSlider(look.info.steps, "step", "step");
    this.root = element("div", { class: "input" }, element("div", { class: "texts" }, this.text, this.targetField, this.steps.root),
      element("div", { class: "buttons" }, this.examples, this.generateButton, this.sampleButton, this.clearButton));
  }

  show(s) {
    for (const name of ["text", "target"]) if (this[name].value !== (s[name] ?? "")) this[name].value = s[name] ?? "";
    this.steps.show(s);
    const can = this.look.info.checkpoints[s.checkpoint].can_generate && !isOffline;
    for (const control of [this.generateButton, this.sampleButton]) control.hidden = !can;
    this.clearButton.hidden = !can || !s.add.length;
  }

  // what an empty target stands for
  showRun(run) {
    if (!run.texts.target) return;
    const tokens = run.texts.target.tokens.slice(1);
    this.target.placeholder = `empty, so the model generates: ${tokens.join(tokens.some((token) => token.startsWith(" ")) ? "" : " ").trim()}`;
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => write({ text: this.text.value, target: this.target.value, ...NEW_TEXT }), 20);
  }

  choose(text) {
    if (!text) return;
    this.examples.value = "";
    write({ text, ...NEW_TEXT });
  }

  async generate(temperature) {
    status("generating …");
    try {
      const s = this.look.state;
      const sampling = { generate: 16, temperature, seed: Math.floor(Math.random() * 1e6) };
      const run = await post("look/run", { ...checkpointOf(s, this.look.info), text: s.text, add: this.look.isPair ? [] : s.add, ...sampling });
      write({ add: run.add.join(","), target: null, position: null });
      status("");
    } catch (error) {
      status(error.message);
    }
  }
}
