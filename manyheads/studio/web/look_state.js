// The state of the tab Look as its address has it, the run that it asks for, and the command that opens it again.

import { stepIndex } from "./look_steps.js";
import { read } from "./state.js";

const list = (text) => (text ?? "").split(",").filter(Boolean);
const integer = (text) => (text === undefined ? null : Number(text));

export function parsed() {
  const s = read();
  return {
    ...s, text: s.text ?? "", checkpoint: Number(s.checkpoint ?? 0), add: list(s.add).map(Number),
    off: list(s.off).map((one) => one.split(":")).map(([name, head]) => [name, Number(head)]),
    mass: Number(s.mass ?? 1), temperature: Number(s.temperature ?? 1), gain: Number(s.gain ?? 1), row: integer(s.row), column: integer(s.column),
    mode: s.mode ?? "head", view: s.view ?? "matrix", compare: s.compare ?? "none", sort: s.sort ?? "layer", isolate: s.isolate ?? "",
  };
}

export function requestOf(s, info) {
  const request = { ...checkpointOf(s, info), text: s.text, add: s.add, off: [] };
  if (s.target && !s.add.length) request.target = s.target;
  return request;
}

// the same tokens again, without the heads that are switched off
export const requestWithout = (s, run) => ({ checkpoint: run.checkpoint, step: run.step, text: s.text, add: run.add, off: s.off });

export function checkpointOf(s, info, step = s.step) {
  const index = stepIndex(info.steps, step);
  return index === null ? { checkpoint: Number(s.checkpoint ?? 0) } : { checkpoint: 0, step: index };
}

export function command(info) {
  const { text, ...rest } = read();
  const quote = (value) => (/^[\w./:=&,+-]+$/.test(value) ? value : `'${value.replaceAll("'", `'"'"'`)}'`);
  const [path, ...others] = info.checkpoints.map((one) => quote(one.path));
  const state = new URLSearchParams(rest).toString();
  return ["manyheads look", path, quote(text ?? ""), ...others.map((one) => `--compare ${one}`), ...(state ? [`--state ${quote(state)}`] : [])].join(" ");
}
