// The keys of the tab Look, and the list of them.

import { element } from "./dom.js";
import { button } from "./look_controls.js";
import { write } from "./state.js";

const KEYS = [
  ["Tab", "next part of the page"], ["arrows", "another head in the grid, another cell in the matrix (Shift: ten)"],
  ["Enter", "open the head, lock the cell"], ["Esc", "release the cell, then back to the grid"],
  ["g / m", "to the grid, to the matrix"], ["r / c", "isolate the row, the column"], ["v", "matrix or lines"], ["+ − 0", "zoom in, out, all"],
  ["[ ]", "previous, next position of the generation"], ["x", "switch the head off or on"], ["t", "tables"], ["?", "this list"],
];

export function helpDialog() {
  const dialog = element("dialog", { class: "help", "aria-label": "Keys" }, element("h2", {}, "Keys"),
    element("dl", {}, ...KEYS.flatMap(([key, what]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, what)])),
    button("Close", "Close this list", () => dialog.close()));
  return dialog;
}

export function onKey(event, look) {
  if (event.target.matches("textarea, input, select") || event.ctrlKey || event.metaKey || event.altKey || look.help.open) {
    if (event.key === "Escape" && event.target.matches("textarea")) event.target.blur();
    return;
  }
  const toggle = (key, value, now) => write({ [key]: now === value ? null : value });
  const s = look.state;
  const actions = {
    "?": () => look.help.showModal(),
    g: () => look.heads.focus(),
    m: () => look.headPanel.current.canvas.focus(),
    v: () => toggle("view", "lines", s.view),
    r: () => toggle("isolate", "row", s.isolate),
    c: () => toggle("isolate", "column", s.isolate),
    t: () => toggle("tables", "1", s.tables),
    x: () => look.headPanel.toggleOff(),
    "[": () => look.next.step(-1),
    "]": () => look.next.step(1),
    Escape: () => { if (!look.headPanel.release()) look.heads.focus(); },
  };
  if (!(event.key in actions) || !look.run) return;
  event.preventDefault();
  actions[event.key]();
}
