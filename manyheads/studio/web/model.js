// The tab Model: the drawing of a model beside its parts, which can be swapped, and the steps from one model to another.
// The model is `model` in the address with the groups of overrides in `set`; a walk is its goal `to` with the number of
// steps taken. A change that gives no valid model is explained, and changes nothing.

import { ApiError, getJson, post } from "./api.js";
import { addStyle, element, status } from "./dom.js";
import { Latest } from "./latest.js";
import { controls } from "./model_fields.js";
import { adoptStyle, costRows, parameterRows, partRows, showDrawing, stepItems, weightRows } from "./model_figures.js";
import { onChange, read, write } from "./state.js";

export const title = "Model";

const DELAY = 100; // milliseconds before costs are requested: a quick walk skips those of steps passed
const NUMBERS = ["batch", "length", "source_length"];

/** The model that an address names. */
function fromAddress(address) {
  let groups = [];
  try {
    const parsed = JSON.parse(address.set ?? "[]");
    groups = parsed.map((group) => group.map(String));
  } catch {
    status("the changes in the address cannot be read");
  }
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, Number.parseInt(address[name] ?? "", 10) || null]));
  return { target: address.model, groups, goal: address.to ?? "", step: Number.parseInt(address.walk ?? "0", 10) || 0, ...numbers };
}

function toAddress(state) {
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, state[name] === null ? null : String(state[name])]));
  return {
    model: state.target,
    set: state.groups.length ? JSON.stringify(state.groups) : null,
    to: state.goal || null,
    walk: state.goal ? String(state.step) : null,
    ...numbers,
  };
}

export async function show(root) {
  const known = await getJson("model/targets");
  await addStyle("model.css");
  adoptStyle(known.style);
  const first = (known.checkpoints[0] ?? known.presets.find((preset) => preset.target === "transformer-base")).target;
  const titles = new Map([...known.presets, ...known.checkpoints].map((target) => [target.target, target.title]));
  let state = null; // the model shown
  let steps = []; // of the walk
  let shown = null; // its description
  let pending = null; // the model that is being loaded
  const latest = new Latest();
  let writing = false;

  // ------------------------------------------------------------------------------------------------------- the page

  const options = (list) => list.map((item) => element("option", { value: item.target }, item.target === item.title ? item.title : `${item.target.startsWith("checkpoint-") ? "" : `${item.target}: `}${item.title}`));
  const targets = () => [
    ...(known.checkpoints.length ? [element("optgroup", { label: "open checkpoints" }, ...options(known.checkpoints))] : []),
    element("optgroup", { label: "presets" }, ...options(known.presets)),
  ];
  const chooseTarget = element("select", { id: "model-target", onchange: () => change({ target: chooseTarget.value, groups: [], goal: "", step: 0, length: null, source_length: null }) }, ...targets());
  const chooseGoal = element("select", { id: "model-goal", onchange: () => change({ groups: groupsNow(), goal: chooseGoal.value, step: 0 }) }, element("option", { value: "" }, "nowhere"), ...targets());
  const back = element("button", { type: "button", id: "model-back", onclick: () => go(-1) }, "← Back");
  const next = element("button", { type: "button", id: "model-next", onclick: () => go(1) }, "Next →");
  const undo = element("button", { type: "button", id: "model-undo", onclick: undoLast }, "Undo");
  const reset = element("button", { type: "button", id: "model-reset", onclick: () => change({ groups: [], goal: "", step: 0 }) }, "Undo all");
  const copyToml = element("button", { type: "button", id: "model-copy-toml", onclick: () => copy(shown.toml, "the TOML") }, "Copy TOML");
  const copyCommand = element("button", { type: "button", id: "model-copy-command", onclick: () => copy(shown.command, "the command") }, "Copy command");
  const bar = element("div", { class: "model-bar" }, element("label", {}, "Model", chooseTarget), undo, reset, copyToml, copyCommand, element("label", {}, "Walk to", chooseGoal), back, next);

  const drawing = element("div", { class: "model-svg" });
  const caption = element("figcaption", {});
  const error = element("p", { class: "model-error", role: "alert", id: "model-error" });
  const equal = element("p", { class: "model-equal", id: "model-equal" });
  const walkList = element("ol", { class: "model-steps", id: "model-steps" });
  const walkTitle = element("h2", {});
  const walk = element("section", { class: "model-panel", "aria-label": "Steps", hidden: true }, walkTitle, walkList);
  const numbers = NUMBERS.map((name) =>
    element("label", {}, { batch: "Texts per batch", length: "Tokens per text", source_length: "Tokens per source" }[name],
      element("input", { id: `model-${name}`, type: "number", min: "1", onchange: (event) => change({ [name]: Number.parseInt(event.target.value, 10) || null }) })));
  const parameterBody = element("tbody", { id: "model-parameters" });
  const costBody = element("tbody", { id: "model-costs" });
  const parts = element("table", {});
  const weights = element("table", {});
  const costs = element("section", { class: "model-panel model-figures", "aria-label": "Figures" }, element("div", { class: "inputs" }, ...numbers), element("table", {}, parameterBody, costBody),
    element("details", {}, element("summary", {}, "Parameters by part"), parts), element("details", {}, element("summary", {}, "Weights and their shapes"), weights));
  const fields = element("div", { id: "model-fields" });
  const free = element("textarea", { id: "model-free", rows: "1", "aria-label": "Overrides, one per line", placeholder: "decoder.position=rope", spellcheck: "false" });
  const freeForm = element("form", { class: "model-free", onsubmit: applyFree }, free, element("button", { id: "model-apply" }, "Apply"));
  const command = element("p", { class: "model-command", id: "model-command" });
  const toml = element("pre", { class: "model-toml", id: "model-toml", tabindex: "0" });
  const text = element("section", { class: "model-panel", "aria-label": "Description" }, command, element("details", {}, element("summary", {}, "TOML"), toml), element("p", {}, "Other overrides, one per line, applied together:"), freeForm);
  root.append(bar, error, element("div", { class: "model-columns" }, element("figure", { class: "model-drawing" }, drawing, caption), element("div", {}, equal, walk, costs, fields, text)));

  free.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) freeForm.requestSubmit();
  });

  // ---------------------------------------------------------------------------------------------------------- actions

  /** The model shown; before the first one has come, the one that is being loaded. */
  const current = () => state ?? pending;

  function groupsNow() {
    return [...current().groups, ...steps.slice(0, current().step).map((step) => step.overrides)];
  }

  /** Shows another model, if it is valid; the address follows. */
  async function change(changes) {
    await load({ ...current(), ...changes }, true);
  }

  /** Some steps further on the walk, also while a step is still being loaded. */
  function go(count) {
    const from = pending && pending.goal === current().goal ? pending.step : current().step;
    return change({ step: from + count });
  }

  /** Changes some fields; a walk goes on from there. */
  function override(...overrides) {
    return change({ groups: [...groupsNow(), overrides], step: 0 });
  }

  function undoLast() {
    const { goal, groups, step } = current();
    return change(goal && step > 0 ? { step: step - 1 } : { groups: groups.slice(0, -1), step: 0 });
  }

  function applyFree(event) {
    event.preventDefault();
    const lines = free.value.split("\n").map((line) => line.trim()).filter((line) => line);
    if (lines.length) override(...lines);
  }

  async function copy(value, what) {
    try {
      await navigator.clipboard.writeText(value);
      status(`copied ${what}`);
    } catch {
      status(`this browser does not let the page copy; ${what} is below, to be selected`);
    }
  }

  // ---------------------------------------------------------------------------------------------------------- loading

  async function load(newState, byHand) {
    const isCurrent = latest.begin();
    pending = newState;
    try {
      let walked = steps;
      const begins = JSON.stringify([newState.target, newState.groups, newState.goal]);
      if (!newState.goal) walked = [];
      else if (!state || begins !== JSON.stringify([state.target, state.groups, state.goal])) {
        walked = (await post("model/walk", { target: newState.target, overrides: newState.groups.flat(), goal: newState.goal })).steps;
      }
      newState.step = Math.max(0, Math.min(newState.step, walked.length));
      const overrides = [...newState.groups, ...walked.slice(0, newState.step).map((step) => step.overrides)].flat();
      const answer = await post("model/describe", { target: newState.target, overrides });
      if (!isCurrent()) return;
      state = newState;
      pending = null;
      steps = walked;
      shown = answer;
      error.textContent = "";
      if (byHand) {
        free.value = "";
        writing = true;
        write(toAddress(state), { replace: false });
        writing = false;
      }
      render();
      await loadCosts(isCurrent, overrides);
    } catch (problem) {
      if (!(problem instanceof ApiError)) throw problem;
      if (!isCurrent()) return;
      pending = null;
      error.textContent = problem.message;
      if (shown) render();
    }
  }

  async function loadCosts(isCurrent, overrides) {
    const batch = Object.fromEntries(NUMBERS.map((name) => [name, state[name]]).filter(([, value]) => value !== null));
    costs.classList.add("waiting");
    await new Promise((resolve) => setTimeout(resolve, DELAY));
    if (!isCurrent()) return;
    const now = await post("model/costs", { target: state.target, overrides, ...batch });
    if (!isCurrent()) return;
    // compared at the same batch; a length beyond the positions of the model at the start cannot be
    const same = { batch: now.flops.batch, length: now.flops.length, ...(now.flops.source_length ? { source_length: now.flops.source_length } : {}) };
    const start = overrides.length ? await post("model/costs", { target: state.target, overrides: [], ...same }).catch(() => null) : now;
    if (!isCurrent()) return;
    costs.classList.remove("waiting");
    costBody.replaceChildren(...costRows(now, start));
    for (const name of NUMBERS) document.getElementById(`model-${name}`).placeholder = now.flops[name] ?? "none";
  }

  function render() {
    const focused = document.activeElement?.id;
    chooseTarget.value = state.target;
    chooseGoal.value = state.goal;
    back.disabled = !state.goal || state.step === 0;
    next.disabled = !state.goal || state.step >= steps.length;
    undo.disabled = reset.disabled = state.groups.length + state.step === 0;
    showDrawing(drawing, shown.svg);
    const isChanged = state.groups.length + state.step > 0;
    caption.replaceChildren(...(shown.about.title ? [`${isChanged ? "Start: " : ""}${shown.about.title}`, element("br"), shown.about.source] : []));
    equal.textContent = shown.equal_presets.length ? `This is the spec of ${shown.equal_presets.join(" and ")}.` : "";
    walk.hidden = !state.goal;
    walkTitle.textContent = state.goal ? `Step ${state.step} of ${steps.length} to ${titles.get(state.goal)}` : "";
    walkList.replaceChildren(...(state.goal ? stepItems(steps, state.step, (step) => change({ step })) : []));
    walkList.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    parameterBody.replaceChildren(...parameterRows(shown));
    parts.replaceChildren(...partRows(shown));
    weights.replaceChildren(...weightRows(shown));
    fields.replaceChildren(...controls(shown.fields, known.slots, override));
    command.textContent = shown.command;
    toml.textContent = shown.toml;
    for (const name of NUMBERS) document.getElementById(`model-${name}`).value = state[name] ?? "";
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  const forget = onChange((address) => {
    if (!writing && (address.tab ?? "") === "model") load({ ...fromAddress(address), target: address.model ?? first }, false);
  });
  const initial = fromAddress(read());
  await load({ ...initial, target: initial.target ?? first }, false);
  if (!shown && !pending) await load({ ...fromAddress({}), target: first }, false);
  return () => {
    latest.drop();
    forget();
  };
}
