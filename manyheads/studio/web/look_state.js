// The state of the tab Look as its address has it, the run that it asks for, and the command that opens it again.

import { isOffline } from "./api.js";
import { GAINS, ISOLATES, MODES, SORTS, VIEWS } from "./look_controls.js";
import { stepIndex } from "./look_steps.js";
import { read } from "./state.js";

const list = (text) => (text ?? "").split(",").filter(Boolean);
export const integer = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);
const among = (options, text, initial) => (Object.hasOwn(options, text ?? "") ? text : initial);
const between = (least, most, text) => (text && Number(text) >= least && Number(text) <= most ? Number(text) : 1);

export function comparisons(info) {
  const options = { none: "nothing", head: "another head" };
  if (isOffline) return options;
  options.text = "another text";
  if (info.steps) options.step = "another step";
  info.checkpoints.slice(1).forEach((checkpoint, i) => { options[`checkpoint-${i + 1}`] = checkpoint.path; });
  return { ...options, off: "heads switched off" };
}

// anyone can write an address: what is not allowed in it counts as left out; the heads of a run are known once it is loaded
export function parsed(info, run) {
  const s = read();
  const checkpoint = knownCheckpoint(s, info);
  const [off, unknown] = headsOff(s, run);
  return {
    ...s, text: s.text ?? "", checkpoint: checkpoint ?? 0, add: list(s.add).map(integer).filter((id) => id !== null),
    off,
    mass: between(0.5, 1, s.mass), temperature: between(0.1, 3, s.temperature), gain: Number(among(GAINS, s.gain, 1)),
    head: integer(s.head) ?? 0, head2: integer(s.head2) ?? 0, row: integer(s.row), column: integer(s.column), position: integer(s.position),
    step2: info.steps?.numbers.includes(integer(s.step2)) ? s.step2 : undefined,
    mode: among(MODES, s.mode, "head"), view: among(VIEWS, s.view, "matrix"), compare: among(comparisons(info), s.compare, "none"),
    sort: among(SORTS, s.sort, "layer"), isolate: among(ISOLATES, s.isolate, "") ?? "",
    problem: [...(checkpoint === null ? [`There is no checkpoint ${s.checkpoint}; checkpoint 0 is shown.`] : []),
      ...unknown.map((name) => `There is no head ${name} to switch off.`)].join(" "),
  };
}

// the heads that are switched off, as pairs of an attention and a number, and those that the run does not have
function headsOff(s, run) {
  const heads = list(s.off).map((text) => [text, ...text.split(":")]).map(([text, name, head]) => ({ text, name, head: integer(head) }));
  const isKnown = ({ name, head }) => head !== null && (!run || run.attentions.some((info) => info.name === name && head < info.heads));
  return [heads.filter(isKnown).map(({ name, head }) => [name, head]), heads.filter((head) => !isKnown(head)).map(({ text }) => text)];
}

// the index of a checkpoint, or null if none has it
function knownCheckpoint(s, info) {
  const index = integer(String(s.checkpoint ?? 0));
  return index !== null && index < info.checkpoints.length ? index : null;
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
  return index === null ? { checkpoint: knownCheckpoint(s, info) ?? 0 } : { checkpoint: 0, step: index };
}

export function command(info) {
  const { text, ...rest } = read();
  const quote = (value) => (/^[\w./:=&,+-]+$/.test(value) ? value : `'${value.replaceAll("'", `'"'"'`)}'`);
  const [path, ...others] = info.checkpoints.map((checkpoint) => quote(checkpoint.path));
  const state = new URLSearchParams(rest).toString();
  return ["manyheads look", path, quote(text ?? ""), ...others.map((other) => `--compare ${other}`), ...(state ? [`--state ${quote(state)}`] : [])].join(" ");
}
