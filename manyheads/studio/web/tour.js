// The guided tour: a panel above every tab, with worked examples as steps. The step is `tour` in the address; n and p go
// to the next and the previous one. A step that the open model cannot show is skipped, and the list says why.

import { ApiError, getJson, query } from "./api.js";
import { addStyle, element, status } from "./dom.js";
import { onChange, read, write } from "./state.js";

export async function openTour() {
  await addStyle("tour.css");
  const tour = new Tour();
  onChange(() => tour.show());
  addEventListener("keydown", (event) => tour.onKey(event));
  await tour.show();
}

class Tour {
  constructor() {
    this.steps = null;
    this.shown = null;
    this.passed = ""; // why steps were passed over on the way to this one
    this.toggle = element("button", { type: "button", id: "tour-button", "aria-expanded": "false", "aria-controls": "tour", onclick: () => this.start() }, "Tour");
    document.querySelector("nav").after(this.toggle);
    this.heading = element("h2", { id: "tour-title" });
    this.text = element("p", {});
    this.note = element("p", { class: "soft", id: "tour-refusal" });
    this.facts = element("ul", { class: "tour-facts", id: "tour-facts" });
    this.tables = element("div", { class: "tour-tables", id: "tour-tables" });
    this.list = element("select", { id: "tour-list", "aria-label": "Steps of the tour", onchange: () => this.go(this.list.value) });
    this.back = element("button", { type: "button", id: "tour-back", title: "Previous step (p)", onclick: () => this.move(-1) }, "← Previous");
    this.next = element("button", { type: "button", id: "tour-next", title: "Next step (n)", onclick: () => this.move(1) }, "Next →");
    const close = element("button", { type: "button", id: "tour-close", onclick: () => this.close() }, "Close");
    this.panel = element("section", { id: "tour", class: "tour", "aria-labelledby": "tour-title", hidden: true },
      element("div", { class: "tour-bar" }, this.heading, this.list, this.back, this.next, close),
      element("div", { class: "tour-body" }, element("div", { class: "tour-words", "aria-live": "polite" }, this.text, this.note, this.facts), this.tables));
    document.getElementById("tab").before(this.panel);
  }

  /** Opens the first step, or closes the tour. */
  async start() {
    if (!this.panel.hidden) return this.close();
    await this.load();
    return this.go(this.possible()[0].key);
  }

  close() {
    write({ tour: null });
    this.toggle.focus();
  }

  async load() {
    if (this.steps) return;
    this.steps = (await getJson("tour/steps")).steps;
    this.list.replaceChildren(...this.steps.map((step, i) =>
      element("option", { value: step.key, disabled: step.skipped }, `${i + 1}. ${step.title}${step.skipped ? `: skipped, ${step.refusal}` : ""}`)));
  }

  possible() { return this.steps.filter((step) => !step.skipped); }

  move(by) {
    const passed = [];
    let index = this.steps.findIndex((step) => step.key === this.shown) + by;
    for (; this.steps[index]?.skipped; index += by) passed.push(`Step ${index + 1} is skipped: ${this.steps[index].refusal}.`);
    if (!this.steps[index]) return;
    this.passed = passed.join(" ");
    this.go(this.steps[index].key);
  }

  /** Goes to a step with its state; what earlier steps set in the address goes, and a text without another stays. */
  go(key) {
    const { state } = this.steps.find((step) => step.key === key);
    const cleared = Object.fromEntries(Object.keys(read()).filter((name) => name !== "text").map((name) => [name, null]));
    write({ ...cleared, ...state, tour: key }, { replace: false });
  }

  async show() {
    const key = read().tour;
    if (key === undefined) {
      this.panel.hidden = true;
      this.shown = null;
      this.toggle.setAttribute("aria-expanded", "false");
      return;
    }
    if (key === this.shown) return;
    try {
      await this.load();
      const step = this.steps.find((candidate) => candidate.key === key && !candidate.skipped);
      if (!step || read().tour !== key) return;
      this.shown = key;
      this.fill(step);
      const numbers = await getJson(query("tour/numbers", { step: key }));
      if (this.shown === key) this.fillNumbers(numbers);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      status(error.message);
    }
  }

  fill(step) {
    const index = this.steps.indexOf(step);
    this.panel.hidden = false;
    this.toggle.setAttribute("aria-expanded", "true");
    this.heading.textContent = `${index + 1} of ${this.steps.length} · ${step.title}`;
    this.text.textContent = step.text;
    const tables = step.refusal ? `Only the tables beside this text show the step; ${step.refusal}.` : "";
    this.note.textContent = [this.passed, tables].filter(Boolean).join(" ");
    this.passed = "";
    this.list.value = step.key;
    this.back.disabled = step === this.possible()[0];
    this.next.disabled = step === this.possible().at(-1);
    this.panel.removeAttribute("data-step");
    this.facts.replaceChildren();
    this.tables.replaceChildren();
  }

  fillNumbers({ facts, tables }) {
    this.facts.replaceChildren(...facts.map(({ text, holds }) => element("li", { class: holds === null ? "" : holds ? "good" : "bad" }, text)));
    this.tables.replaceChildren(...tables.map(matrix));
    this.panel.dataset.step = this.shown;
  }

  onKey(event) {
    if (this.panel.hidden || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("textarea, input, select")) return;
    const by = { n: 1, p: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.move(by);
  }
}

/** A small matrix: words beside its rows and above its columns, a shade for each weight, and the sums of the rows. */
function matrix({ title, rows, columns, values, sums, marked }) {
  const isShares = values.flat().every((value) => value <= 1);
  const heads = [...columns, ...(sums ? ["sum"] : [])].map((name) => element("th", { scope: "col" }, name));
  const body = rows.map((name, i) => element("tr", {}, element("th", { scope: "row" }, name),
    ...values[i].map((value, j) => element("td", { class: `shade-${isShares ? shade(value) : 0}${marked?.[i] === j ? " marked" : ""}` }, written(value))),
    ...(sums ? [element("td", { class: Math.abs(sums[i] - 1) < 1e-5 ? "sum" : "sum other" }, sums[i].toFixed(2))] : [])));
  return element("table", { class: "tour-matrix" }, element("caption", {}, title), element("thead", {}, element("tr", {}, element("td"), ...heads)), element("tbody", {}, ...body));
}

const shade = (value) => Math.min(4, Math.round(4 * Math.sqrt(Math.min(1, value))));
const written = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(3));
