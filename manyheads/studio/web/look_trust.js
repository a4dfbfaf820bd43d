// Checks of the numbers of a run: sums of rows, weights on masked keys, recorded against recomputed, and the hash of the weights.

import { getJson, query } from "./api.js";
import { number } from "./canvas.js";
import { element } from "./dom.js";

const CHECKS = ["row_sum", "masked", "difference"];

export class Trust {
  constructor() {
    this.root = element("div", { class: "trust", role: "group", "aria-label": "Checks of this run" });
    this.hashes = new Map(); // by the question for one
  }

  start(run, checkpoint) {
    this.question = { checkpoint: run.checkpoint, ...(run.step === null ? {} : { step: run.step }) };
    Object.assign(this, { total: run.attentions.length, checkpoint, measured: 0, row_sum: 0, masked: 0, difference: 0 });
    this.show();
  }

  add(trust) {
    this.measured++;
    for (const name of CHECKS) this[name] = Math.max(this[name], trust[name]);
    this.show();
  }

  async showHash() {
    const path = query("look/hash", this.question);
    if (!this.hashes.has(path)) this.hashes.set(path, (await getJson(path)).sha256);
    this.show();
  }

  show() {
    const [limit, hash] = [this.checkpoint.dtype === "float32" ? 1e-5 : 1e-2, this.hashes.get(query("look/hash", this.question))];
    const done = this.measured === this.total ? "" : ` (${this.measured} of ${this.total} attentions)`;
    const chip = (text, hint, good = null) => element("span", { class: `chip ${good === null ? "" : good ? "good" : "bad"}`, title: hint }, text);
    const measured = (name, value, good, hint) => (this.measured ? chip(`${name} ${value}`, hint, good) : chip(`${name} …`, hint));
    this.root.replaceChildren(
      measured("row sums", `1 ± ${this.row_sum.toExponential(0)}${done}`, this.row_sum < limit, "The largest distance of a row's sum from 1"),
      measured("weight on masked keys", number(this.masked), this.masked === 0,
        "The largest weight on a key that the mask hides; a causal mask hides all keys after the query"),
      measured("recorded − recomputed", this.difference.toExponential(0), this.difference < limit,
        "The largest difference between weights × values, computed now, and what the fused kernel gave in this run"),
      chip(this.checkpoint.dtype, "Precision of the weights of the model"),
      chip(hash ? `sha256 ${hash.slice(0, 12)}` : "sha256 …", hash ?? "Hash of the weights"),
    );
  }
}
