// Controls for the fields of a model: a list of kinds with their formulas for each slot, and inputs for numbers and words.

import { element } from "./dom.js";

/** One panel per table of the model. `override(assignment)` changes a field. */
export function controls(fields, slots, override) {
  const tables = fields.filter((field) => field.type === "table");
  const own = { name: "model", fields: fields.filter((field) => field.type !== "table"), formula: "" };
  return [...tables, own].map((table) => panel(table, slots, override));
}

function panel(table, slots, override) {
  const parts = table.fields.filter((field) => ["part", "table"].includes(field.type));
  const plain = table.fields.filter((field) => !["part", "table"].includes(field.type));
  return element("fieldset", { class: "model-panel" }, element("legend", {}, table.name), inputs(plain, override), ...parts.map((field) => slot(field, slots, override)));
}

/** A slot with its kind, formula and fields. */
function slot(field, slots, override) {
  const id = `field-${field.path}`;
  const hasControl = field.type === "part" || field.optional;
  const name = element(hasControl ? "label" : "span", { class: "name", for: hasControl ? id : null, title: field.meaning }, field.name);
  let control;
  if (field.type === "part") {
    control = element("select", { id, onchange: () => override(`${field.path}=${control.value}`) },
      ...(field.optional ? [element("option", { value: "false", selected: field.kind === null }, "not set")] : []),
      ...slots[field.slot].map((kind) => element("option", { value: kind.kind, selected: kind.kind === field.kind }, `${kind.kind}: ${kind.formula}`)));
  } else {
    control = field.optional ? element("input", { id, type: "checkbox", checked: field.value !== null, onchange: () => override(`${field.path}=${control.checked}`) }) : null;
  }
  return element("div", { class: "model-slot" }, element("div", { class: "line" }, name, control), field.formula ? element("p", { class: "formula" }, field.formula) : null, ...inner(field.fields, slots, override));
}

/** The fields of a part or table, and the parts within it. */
function inner(fields, slots, override) {
  const parts = fields.filter((field) => ["part", "table"].includes(field.type));
  const plain = fields.filter((field) => !["part", "table"].includes(field.type));
  return [inputs(plain, override), ...(parts.length ? [element("div", { class: "model-nested" }, ...parts.map((field) => slot(field, slots, override)))] : [])];
}

function inputs(fields, override) {
  return fields.length ? element("div", { class: "model-fields" }, ...fields.map((field) => element("label", { title: field.meaning }, field.name, input(field, override)))) : null;
}

function input(field, override) {
  const id = `field-${field.path}`;
  const assign = (value) => override(`${field.path}=${value}`);
  if (field.type === "switch") return element("input", { id, type: "checkbox", checked: field.value === "true", onchange: (event) => assign(event.target.checked) });
  if (field.type === "choice") {
    return element("select", { id, onchange: (event) => assign(event.target.value) }, ...field.choices.map((choice) => element("option", { value: choice, selected: choice === field.value }, choice)));
  }
  const isLong = (field.value ?? "").length > 12;
  return element("input", { id, class: isLong ? "long" : null, value: field.value ?? "", placeholder: field.optional ? "not set" : "", spellcheck: "false", autocomplete: "off",
    onchange: (event) => assign(event.target.value.trim() || (field.optional ? "false" : '""')) });
}
