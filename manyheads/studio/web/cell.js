// Why one cell is as bright as it is: q, k, their product, the terms of words and positions, the mask, the row.

import { label, number } from "./canvas.js";
import { element } from "./dom.js";

const TERMS = {
  word_word: "word · word", word_position: "word · position", position_word: "position · word",
  position_position: "position · position", bias: "biases, position scheme",
};

export function showCell(root, cell, names) {
  root.replaceChildren();
  if (!cell) {
    root.append(element("p", { class: "soft" }, "Choose a cell of the matrix: a click or Enter locks it, Esc releases it."));
    return;
  }
  const softmax = cell.denominator !== undefined;
  root.append(
    element("p", { class: "pair" }, element("b", {}, label(names.query, 24)), " attends to ", element("b", {}, label(names.key, 24))),
    element("p", { class: "big" }, cell.masked ? "masked" : number(cell.weight)),
    element("p", { class: "soft" }, cell.masked ? "The mask sets this score to −∞, so its weight is 0."
      : `The ${ordinal(cell.rank)} largest of ${cell.visible.toLocaleString("en")} visible keys; its row sums to ${cell.row_sum.toFixed(6)}.`),
  );
  const steps = [];
  if (cell.query) {
    steps.push(["q · k", number(cell.dot)], [`× scale ${number(cell.scale)}`, number(cell.dot * cell.scale)]);
    if (cell.bias) steps.push(["+ bias of the position scheme", number(cell.bias)]);
  }
  steps.push(["score", number(cell.score)]);
  if (softmax) {
    steps.push(["− highest score of the row", number(cell.highest)], ["exp", number(Math.exp(cell.score - cell.highest))],
      ["÷ denominator Σ exp", number(cell.denominator)]);
  }
  steps.push([softmax ? "= weight" : `weight by ${cell.core}`, number(cell.weight)]);
  root.append(element("dl", { class: "steps" }, ...steps.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
  if (cell.terms) {
    root.append(element("h4", {}, "Where the score comes from"), bars(Object.entries(cell.terms).map(([name, value]) => [TERMS[name], value])));
  }
  if (cell.query) root.append(element("h4", {}, `q and k, ${cell.query.length} dimensions`), vectors(cell.query, cell.key));
}

const ENDINGS = { one: "st", two: "nd", few: "rd", other: "th" };
const RULES = new Intl.PluralRules("en", { type: "ordinal" });
const ordinal = (n) => (n === 1 ? "" : `${n}${ENDINGS[RULES.select(n)]}`);

// a list of signed numbers as bars around 0
export function bars(entries) {
  const largest = Math.max(...entries.map(([, value]) => Math.abs(value)), 1e-12);
  return element("div", { class: "bars" }, ...entries.map(([name, value]) => {
    const bar = element("i", { class: value < 0 ? "minus" : "plus" });
    bar.style.width = `${(50 * Math.abs(value)) / largest}%`;
    return element("div", {}, element("span", {}, name), element("u", {}, bar), element("b", {}, number(value)));
  }));
}

// three strips: q, k and the products, whose sum is q · k; the largest products are named
function vectors(query, key) {
  const products = query.map((value, i) => value * key[i]);
  const strip = (name, values) => {
    const largest = Math.max(...values.map(Math.abs), 1e-12);
    const cells = values.map((value, i) => {
      const cell = element("i", { title: `${name}[${i}] = ${number(value)}`, class: value < 0 ? "minus" : "plus" });
      cell.style.opacity = Math.sqrt(Math.abs(value) / largest).toFixed(3);
      return cell;
    });
    return element("div", { class: "strip" }, element("span", {}, name), element("div", {}, ...cells));
  };
  const order = [...products.keys()].sort((a, b) => Math.abs(products[b]) - Math.abs(products[a])).slice(0, 3);
  return element("div", { class: "vectors" }, strip("q", query), strip("k", key), strip("q × k", products),
    element("p", { class: "soft" }, `Largest products: ${order.map((i) => `dimension ${i}: ${number(products[i])}`).join(", ")}`));
}
