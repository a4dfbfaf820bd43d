// The panel of the next tokens: a position of the generation, a temperature, and tokens to append.

import { getJson, isOffline, query } from "./api.js";
import { label } from "./canvas.js";
import { element, status } from "./dom.js";
import { range } from "./look_controls.js";
import { requestWithout } from "./look_state.js";
import { showNext } from "./next.js";
import { write } from "./state.js";

export class NextPanel {
  constructor(look) {
    this.look = look;
    this.title = element("h3", {});
    this.list = element("div", {});
    this.position = range("position", { min: "0", step: "1", "aria-label": "Position of the generation" });
    this.positionField = element("label", {}, "position", this.position);
    this.temperature = range("temperature", { min: "0.1", max: "3", step: "0.05", "aria-label": "Temperature" }, "1");
    this.temperatureText = element("output", {});
    this.root = element("section", { class: "nextpanel", "aria-label": "Next tokens" }, this.title, this.positionField,
      element("label", {}, "temperature", this.temperature, this.temperatureText), this.list);
  }

  get text() { return this.look.run.texts.target ?? this.look.run.texts.text; }

  // the position whose next token is shown: as in the address, or the last
  at(s) {
    const last = this.text.tokens.length - 1;
    return Math.min(last, s.position ?? last);
  }

  step(by) { write({ position: Math.max(0, this.at(this.look.state) + by) }); }

  async show(s, isCurrent) {
    const { run, runs, info } = this.look;
    const { output, per_token: perToken, can_generate: canGenerate } = info.checkpoints[s.checkpoint];
    this.root.hidden = !["tokens", "classes"].includes(output);
    if (this.root.hidden) return;
    const at = this.at(s);
    this.position.max = this.text.tokens.length - 1;
    this.position.value = at;
    this.positionField.hidden = !perToken;
    this.temperature.value = s.temperature;
    this.temperatureText.textContent = s.temperature.toFixed(2);
    const after = output === "tokens" && !canGenerate ? "Token at" : "Next token after";
    this.title.textContent = output === "classes" ? "Classes" : `${after} ${label(this.text.tokens[at], 18)} (${at})`;
    try {
      const of = (shownRun) => getJson(query("look/next", { run: shownRun.run, position: at }));
      const [next, without] = await Promise.all([of(run), s.off.length ? runs.load(requestWithout(s, run)).then(of) : null]);
      if (isCurrent()) showNext(this.list, next, without, s.temperature, canGenerate && !isOffline ? (id) => this.append(id) : null, output);
    } catch (error) {
      this.list.replaceChildren(element("p", { class: "soft" }, error.message));
    }
  }

  // a token chosen at an earlier position replaces what follows it
  append(id) {
    const { run, isPair, state } = this.look;
    const [at, ids] = [this.at(state), this.text.ids];
    const first = isPair ? 1 : ids.length - run.add.length; // of the tokens that may be replaced
    if (at + 1 < first) {
      status("Only tokens after the text can be replaced; choose the last position.");
      return;
    }
    write({ add: [...ids.slice(first, at + 1), id].join(","), target: null, position: null });
  }
}
