// The next tokens at a position: their probabilities at a temperature, and what switched-off heads change.

import { label, number } from "./canvas.js";
import { element } from "./dom.js";

const SHOWN = 12;
const LEAST = 0.0001; // smaller shares are not told apart

// probabilities of the listed tokens; the sums over all tokens are exact for each temperature of the slider
export function probabilities(next, temperature) {
  const index = next.temperatures.reduce((best, candidate, i) => (Math.abs(candidate - temperature) < Math.abs(next.temperatures[best] - temperature) ? i : best), 0);
  const t = next.temperatures[index];
  return new Map(next.tokens.map(([id, name, logit]) => [id, { name, p: Math.exp(logit / t - next.log_sums[index]) }]));
}

// without: the same position with heads switched off, or null. choose(id) appends a token, or is null.
export function showNext(root, next, without, temperature, choose, output) {
  root.replaceChildren();
  const before = probabilities(next, temperature);
  const after = without ? probabilities(without, temperature) : null;
  const ids = [...new Set([before, after ?? new Map()].flatMap((tokens) => [...tokens.keys()].slice(0, SHOWN)))];
  const largest = Math.max(...ids.flatMap((id) => [before.get(id)?.p ?? 0, after?.get(id)?.p ?? 0]), 1e-9);
  const rows = ids.map((id) => rowOf(id, before, after, largest, choose));
  const listed = ids.reduce((sum, id) => sum + (before.get(id)?.p ?? 0), 0);
  const titles = [output === "classes" ? "class" : "token", "", "p", ...(after ? ["change"] : [])];
  root.append(element("table", { class: "next" },
    element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))), element("tbody", {}, ...rows)));
  const note = (text) => root.append(element("p", { class: "soft" }, text));
  if (next.vocab > ids.length) {
    note(`${ids.length} of ${next.vocab.toLocaleString("en")} ${output === "classes" ? "classes" : "tokens"} are listed; they have ${percent(listed)} of the probability.`);
  }
  if (after) {
    const kl = number(divergence(before, after));
    note(`Solid: the whole model; outlined: without the heads that are off. KL of the ${before.size} most probable ${output === "classes" ? "classes" : "tokens"}: ${kl} nats.`);
  }
}

function rowOf(id, before, after, largest, choose) {
  const [p, q] = [before.get(id)?.p, after?.get(id)?.p];
  const bar = (share, name) => {
    const filled = element("i", { class: name });
    filled.style.width = `${(100 * (share ?? 0)) / largest}%`;
    return filled;
  };
  const text = element("span", { class: "token" }, label((before.get(id) ?? after.get(id)).name, 16));
  const head = choose ? element("button", { type: "button", class: "plain", title: "Append this token", onclick: () => choose(id) }, text) : text;
  const change = after && p !== undefined && q !== undefined ? q - p : null;
  const changed = change === null ? "–" : `${change < 0 ? "−" : "+"}${percent(Math.abs(change))}`;
  return element("tr", {}, element("th", { scope: "row" }, head), element("td", { class: "track" }, bar(p), after ? bar(q, "after") : null),
    element("td", { class: "value" }, p === undefined ? "–" : percent(p)),
    after ? element("td", { class: `value ${Math.abs(change) < LEAST ? "" : change < 0 ? "minus" : "plus"}` }, changed) : null);
}

function divergence(before, after) {
  let sum = 0;
  for (const [id, { p }] of before) if (after.has(id) && p > 0) sum += p * Math.log(p / after.get(id).p);
  return Math.max(0, sum);
}

const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : p >= LEAST ? `${(100 * p).toFixed(2)} %` : "< 0.01 %");
