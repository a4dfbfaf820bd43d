// The next tokens at a position: their probabilities at a temperature, and what switched-off heads change.

import { label, number } from "./canvas.js";
import { element } from "./dom.js";

const SHOWN = 12;

// probabilities of the listed tokens; the sums over all tokens are exact for each temperature of the slider
export function probabilities(next, temperature) {
  const index = next.temperatures.reduce((best, one, i) => (Math.abs(one - temperature) < Math.abs(next.temperatures[best] - temperature) ? i : best), 0);
  const t = next.temperatures[index];
  return new Map(next.tokens.map(([id, name, logit]) => [id, { name, p: Math.exp(logit / t - next.log_sums[index]) }]));
}

// without: the same position with heads switched off, or null. choose(id) appends a token, or is null.
export function showNext(root, next, without, temperature, choose) {
  root.replaceChildren();
  const before = probabilities(next, temperature);
  const after = without ? probabilities(without, temperature) : null;
  const ids = [...before.keys()].slice(0, SHOWN);
  if (after) for (const id of [...after.keys()].slice(0, SHOWN)) if (!ids.includes(id)) ids.push(id);
  const largest = Math.max(...ids.flatMap((id) => [before.get(id)?.p ?? 0, after?.get(id)?.p ?? 0]), 1e-9);
  const rows = ids.map((id) => {
    const [p, q] = [before.get(id)?.p, after?.get(id)?.p];
    const name = (before.get(id) ?? after.get(id)).name;
    const bar = element("i", {});
    bar.style.width = `${(100 * (p ?? 0)) / largest}%`;
    const cells = [bar];
    if (after) {
      const other = element("i", { class: "after" });
      other.style.width = `${(100 * (q ?? 0)) / largest}%`;
      cells.push(other);
    }
    const text = element("span", { class: "token" }, label(name, 16));
    const head = choose ? element("button", { type: "button", class: "plain", title: "Append this token", onclick: () => choose(id) }, text) : text;
    const change = after && p !== undefined && q !== undefined ? q - p : null;
    return element("tr", {}, element("th", { scope: "row" }, head), element("td", { class: "track" }, ...cells), element("td", { class: "value" }, p === undefined ? "–" : percent(p)),
      ...(after ? [element("td", { class: `value ${change < 0 ? "minus" : "plus"}` }, change === null ? "–" : `${change < 0 ? "−" : "+"}${percent(Math.abs(change))}`)] : []));
  });
  const listed = [...before.values()].reduce((sum, { p }) => sum + p, 0);
  const titles = ["token", "", "p", ...(after ? ["change"] : [])];
  root.append(element("table", { class: "next" }, element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))), element("tbody", {}, ...rows)));
  if (next.vocab > next.tokens.length) root.append(element("p", { class: "soft" }, `${next.tokens.length} of ${next.vocab.toLocaleString("en")} tokens are listed; they have ${percent(listed)} of the probability.`));
  if (after) root.append(element("p", { class: "soft" }, `Solid: the whole model; outlined: without the heads that are off. KL of the listed tokens: ${number(divergence(before, after))} nats.`));
}

function divergence(before, after) {
  let sum = 0;
  for (const [id, { p }] of before) if (after.has(id) && p > 0) sum += p * Math.log(p / after.get(id).p);
  return Math.max(0, sum);
}

const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : p >= 0.0001 ? `${(100 * p).toFixed(2)} %` : "< 0.01 %");
