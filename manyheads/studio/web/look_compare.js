// What a head is compared with: another head, text or checkpoint, or the run without the heads that are switched off.

import { element } from "./dom.js";
import { groupName } from "./grid.js";
import { checkpointOf, requestOf, requestWithout } from "./look_state.js";
import { StepSlider } from "./look_steps.js";
import { write } from "./state.js";

export const attentionNamed = (run, name) => run.attentions.find((info) => info.name === name) ?? run.attentions.at(-1);

export class Compare {
  constructor(look) {
    this.look = look;
    this.root = element("div", { class: "other" });
  }

  // whether a whole run is compared, and not another head of the same
  hasRun(s) { return !["none", "head"].includes(s.compare); }

  // the other run, or null
  async run(s) {
    const { runs, run, info } = this.look;
    const request = requestOf(s, info);
    if (s.compare === "text") return runs.load({ ...request, text: s.text2 ?? s.text, add: [] });
    if (s.compare === "off") return runs.load(requestWithout(s, run));
    // the same tokens at another step, whatever it would generate
    if (s.compare === "step") return runs.load({ ...checkpointOf(s, info, s.step2 ?? info.steps.numbers[0]), text: s.text, add: run.add, off: [] });
    if (s.compare.startsWith("checkpoint")) return runs.load({ ...request, step: null, checkpoint: Number(s.compare.split("-")[1]) });
    return null;
  }

  // run, attention and head of the second matrix, or null
  async second(s) {
    if (s.compare === "none") return null;
    if (s.compare === "head") {
      const [info, head] = this.secondHead(s);
      return [this.look.run, info, String(head)];
    }
    const run = await this.run(s);
    return [run, attentionNamed(run, this.look.attention.name), this.look.shownHead];
  }

  // unless one is chosen, the next head of the same attention
  secondHead(s) {
    const { run, attention, head } = this.look;
    return s.attention2 ? [attentionNamed(run, s.attention2), Math.min(s.head2, attentionNamed(run, s.attention2).heads - 1)] : [attention, (head + 1) % attention.heads];
  }

  show(s) {
    if (this.shown === s.compare && !["head", "step"].includes(s.compare)) return;
    const fields = { text: () => this.textField(s), head: () => this.headField(s), step: () => this.stepField(s), off: () => this.offNote() };
    if (this.shown !== "step" || s.compare !== "step") this.root.replaceChildren(...(fields[s.compare]?.() ?? []));
    else this.slider.show(s);
    this.shown = s.compare;
  }

  textField(s) {
    const field = element("textarea", { id: "text2", rows: "1", oninput: () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => write({ text2: field.value }), 60);
    } });
    field.value = s.text2 ?? s.text;
    return [element("label", {}, "second text", field)];
  }

  headField(s) {
    const [info, head] = this.secondHead(s);
    const field = element("select", { id: "head2", onchange: () => {
      const [attention2, head2] = field.value.split("/");
      write({ attention2, head2 });
    } }, ...this.look.heads.grid.heads().map((item) => element("option", { value: `${item.info.name}/${item.head}` },
      `${groupName(item.info)} · layer ${item.info.layer} · head ${item.head}`)));
    field.value = `${info.name}/${head}`;
    return [element("label", {}, "second head", field)];
  }

  stepField(s) {
    this.slider = new StepSlider(this.look.info.steps, "step2", "second step", 0);
    this.slider.show(s);
    return [this.slider.root];
  }

  offNote() { return [element("p", { class: "soft" }, "Right: the same head in a run without the heads that are switched off.")]; }
}
