// The tab Receptive field: which tokens change the output at one position, after each layer, and the tree of pointers.

import { ApiError, getJson, post } from "./api.js";
import { label } from "./canvas.js";
import { addStyle, element, status, table } from "./dom.js";
import { Latest } from "./latest.js";
import { checkpointOf, integer } from "./look_state.js";
import { onChange, read, write } from "./state.js";
import { shape } from "./svg.js";

export const title = "Receptive field";

const [COLUMN, ROW, LEFT, TOP] = [34, 56, 110, 14]; // of the tree
const layerName = (depth) => (depth ? `${depth} layer${depth > 1 ? "s" : ""}` : "embeddings");

export async function show(root) {
  await addStyle("field.css");
  const field = new ReceptiveField(root, await getJson("look/info"));
  const forget = onChange((state) => state.tab === "field" && field.load());
  await field.load();
  return () => {
    forget();
    field.latest.drop();
  };
}

class ReceptiveField {
  constructor(root, info) {
    this.info = info;
    this.latest = new Latest();
    this.initial = info.text || info.checkpoints[0].examples[0];
    this.text = element("textarea", { id: "field-text", rows: "2", spellcheck: "false", "aria-label": "Text" });
    this.error = element("p", { class: "field-error", role: "alert", id: "field-error" });
    this.result = element("div", { id: "field-result" });
    root.append(element("form", { class: "field-form", onsubmit: (event) => this.submit(event) }, this.text, element("button", { id: "field-start" }, "Measure")), this.error, this.result);
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      event.target.form.requestSubmit();
    });
  }

  submit(event) {
    event.preventDefault();
    write({ text: this.text.value, output: null, add: null, row: null, column: null, position: null });
  }

  async load() {
    const state = read();
    const text = state.text ?? this.initial;
    const position = integer(state.output);
    const wrong = state.output === undefined || position !== null ? "" : `There is no position ${state.output}; the last one is shown.`;
    const request = { ...checkpointOf(state, this.info), text, position };
    const key = JSON.stringify(request);
    if (key === this.requested) return;
    this.requested = key;
    this.text.value = text;
    const isCurrent = this.latest.begin();
    status("replacing each token in turn …");
    try {
      const answer = await post("field/measure", request);
      if (isCurrent()) {
        this.show(answer);
        this.error.textContent = wrong;
      }
    } catch (problem) {
      if (!(problem instanceof ApiError)) throw problem;
      if (!isCurrent()) return;
      this.result.replaceChildren();
      this.error.textContent = problem.message;
    }
    if (isCurrent()) status("");
  }

  show(answer) {
    const focused = this.result.contains(document.activeElement) && document.activeElement.dataset.position !== undefined;
    this.error.textContent = "";
    this.result.replaceChildren(summary(answer), this.grid(answer), legend(answer), ...(answer.tree ? [element("h2", {}, "The tree of pointers"), tree(answer)] : []), numbers(answer));
    this.result.dataset.position = answer.position;
    if (focused) this.result.querySelector("[aria-pressed=true]").focus();
  }

  /** Tokens in columns, numbers of layers in rows; the token of a column is a button that chooses the output. */
  grid(answer) {
    const choose = (position) => write({ output: String(position) });
    const move = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(answer.tokens.length - 1, Number(event.target.dataset.position) + step)));
    };
    const heads = answer.tokens.map((token, i) => element("th", { scope: "col" }, element("button", {
      type: "button", "data-position": i, "aria-pressed": String(i === answer.position), tabindex: i === answer.position ? "0" : "-1",
      "aria-label": `output at ${label(token)} (${i})`, onclick: () => choose(i), onkeydown: move,
    }, label(token))));
    const rows = answer.depths.map((depth, n) => element("tr", {}, element("th", { scope: "row" }, n ? `after ${layerName(n)}` : "embeddings"), ...answer.tokens.map((_, i) => cell(depth, i, answer.position))));
    return element("div", { class: "field-scroll" }, element("table", { class: "field-grid", id: "field-grid" },
      element("caption", {}, "Choose the output with a click on its token, or with ← and →."), element("thead", {}, element("tr", {}, element("td"), ...heads)), element("tbody", {}, ...rows.reverse())));
  }
}

function cell(depth, i, position) {
  const changes = depth.measured.includes(i);
  const points = depth.pointers?.includes(i) ?? false;
  const masked = !depth.visible.includes(i);
  const names = [changes ? "changes" : masked ? "masked" : "none", points ? "points" : "", i === position ? "own" : ""];
  const text = changes ? "●" : masked ? "" : "·";
  const what = `${changes ? "changes the output" : masked ? "masked" : "does not change it"}${points ? ", reached by pointers" : ""}`;
  return element("td", { class: names.filter(Boolean).join(" "), title: what }, element("span", { "aria-hidden": "true" }, text), element("span", { class: "field-spoken" }, what));
}

function summary(answer) {
  const [last, layers] = [answer.depths.at(-1), answer.depths.length - 1];
  const name = `${label(answer.tokens[answer.position], 30)} (${answer.position})`;
  const sentences = [`After ${layerName(layers)}, ${last.measured.length} of ${answer.tokens.length} tokens change the output at ${name}; the mask lets ${last.visible.length} reach it.`];
  if (answer.heads) {
    const extra = last.measured.filter((i) => !last.pointers.includes(i)).length;
    sentences.push(`${answer.heads} argmax head${answer.heads > 1 ? "s" : ""} per layer reach at most (k + 1)ⁿ = (${answer.heads} + 1)^${layers} = ${last.formula.toLocaleString("en")}; their pointers reach ${last.pointers.length}.`);
    sentences.push(extra ? `${extra} more change it, because a replaced token can move a pointer.` : "No other token changes it.");
  } else sentences.push("A head with a softmax gives every token that its mask lets through a weight above 0.");
  return element("p", { id: "field-summary" }, sentences.join(" "));
}

function legend(answer) {
  const item = (name, text, what) => element("li", {}, element("span", { class: `field-sample ${name}` }, text), what);
  return element("ul", { class: "field-legend" }, item("changes", "●", `a replacement by ${answer.replacements.map((token) => `“${label(token)}”`).join(" or ")} changes the output by more than rounding`),
    item("none", "·", "no change"), item("masked", "", "no path through the mask"), ...(answer.heads ? [item("points", "", "reached by the pointers of the unchanged text")] : []));
}

function numbers(answer) {
  const pointers = answer.heads ? ["reached by pointers", "(k + 1)ⁿ", "pointers at most: min((k + 1)ⁿ, let through)"] : [];
  const titles = ["after", "tokens that change it", `let through by the mask, of ${answer.tokens.length}`, ...pointers];
  const rows = answer.depths.map((depth, n) => [layerName(n), depth.measured.length, depth.visible.length, ...(answer.heads ? [depth.pointers.length, depth.formula.toLocaleString("en"), depth.bound] : [])].map(String));
  return table("Sizes of the receptive field", titles, rows);
}

/** From the output at the top to the inputs at the bottom: a line for each head, and a dashed one for the residual stream. */
function tree(answer) {
  const layers = answer.tree.length;
  const [width, height] = [LEFT + answer.tokens.length * COLUMN + 20, TOP + layers * ROW + 90];
  const x = (i) => LEFT + (i + 0.5) * COLUMN;
  const y = (level) => TOP + 6 + level * ROW;
  const root = shape("svg", { class: "field-tree", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Pointers of each layer from the output at position ${answer.position} to ${answer.depths.at(-1).pointers.length} inputs` });
  const nodes = [...answer.tree.map((level) => level.map(([i]) => i)), answer.depths.at(-1).pointers];
  answer.tree.forEach((level, n) => {
    for (const [from, keys] of level) {
      root.append(shape("line", { class: "own", x1: x(from), y1: y(n), x2: x(from), y2: y(n + 1) }));
      keys.forEach((to, head) => root.append(shape("line", { class: "pointer", x1: x(from), y1: y(n), x2: x(to), y2: y(n + 1) }, shape("title", {}, `layer ${layers - 1 - n}, head ${head}: ${from} → ${to}`))));
    }
  });
  nodes.forEach((level, n) => {
    root.append(shape("text", { class: "name", x: LEFT - 14, y: y(n) + 4, "text-anchor": "end" }, n === layers ? "inputs" : `layer ${layers - 1 - n}`));
    answer.tokens.forEach((_, i) => root.append(shape("circle", { class: level.includes(i) ? "reached" : "other", cx: x(i), cy: y(n), r: level.includes(i) ? 6 : 2 })));
  });
  answer.tokens.forEach((token, i) => root.append(shape("text", { class: "token", "text-anchor": "end", transform: `translate(${x(i) + 4} ${y(layers) + 16}) rotate(-55)` }, label(token, 10))));
  return element("div", { class: "field-scroll" }, root);
}
