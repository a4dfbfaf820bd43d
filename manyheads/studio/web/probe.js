// The tab Probe: the accuracy of a linear classifier on every layer, beside chance and two controls, as they are fitted.

import { ApiError, getJson, post, query } from "./api.js";
import { addStyle, element, status, table } from "./dom.js";
import { Latest } from "./latest.js";
import { checkpointOf, integer } from "./look_state.js";
import { onChange, read, write } from "./state.js";
import { shape } from "./svg.js";

export const title = "Probe";

const WINDOWS = { auto: "the text, if long enough, or random ids", text: "the text", random: "random ids" };
const [HEIGHT, LEFT, TOP, BOTTOM, STEP] = [240, 46, 12, 34, 56]; // of the chart

export async function show(root) {
  await addStyle("probe.css");
  const probe = new Probe(root, await getJson("probe/labels"), await getJson("look/info"));
  const forget = onChange((state) => state.tab === "probe" && probe.load());
  await probe.load();
  return () => {
    forget();
    probe.latest.drop();
  };
}

/** What an address says about the probes, and a sentence about what it may not say, which counts as left out. */
function fromAddress(info, known) {
  const state = read();
  const wrong = [];
  const checked = (value, isAllowed, initial, sentence) => {
    if (value === undefined || isAllowed(value)) return value ?? initial;
    wrong.push(sentence);
    return initial;
  };
  const label = checked(state.probe, (value) => Object.hasOwn(known.labels, value), "position", `There is no label ${state.probe}; positions are probed.`);
  const windows = checked(state.windows, (value) => Object.hasOwn(WINDOWS, value), "auto", `There are no windows of ${state.windows}.`);
  const length = checked(state.window, (value) => integer(value) >= 2 && integer(value) <= known.max_length, "8",
    `A window has 2 to ${known.max_length} tokens, not ${state.window}; it has 8.`);
  return { request: { ...checkpointOf(state, info), text: state.text ?? "", label, windows, length: Number(length) }, wrong: wrong.join(" ") };
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const layerName = (name) => (name.endsWith(".embed") ? "embeddings" : `layer ${name.split(".").at(-1)}`);

class Probe {
  constructor(root, known, info) {
    Object.assign(this, { info, known });
    this.latest = new Latest();
    this.requested = null; // what is shown, as a request
    this.text = element("textarea", { id: "probe-text", rows: "4", spellcheck: "false" });
    this.text.value = read().text ?? info.text ?? "";
    const options = (entries) => Object.entries(entries).map(([value, text]) => element("option", { value }, text));
    this.label = element("select", { id: "probe-label" }, ...options(known.labels));
    this.windows = element("select", { id: "probe-windows" }, ...options(WINDOWS));
    this.length = element("input", { id: "probe-length", type: "number", min: "2", max: String(known.max_length), required: true });
    this.error = element("p", { class: "probe-error", role: "alert", id: "probe-error" });
    this.result = element("div", { id: "probe-result", "aria-live": "polite" });
    const form = element("form", { class: "probe-form", onsubmit: (event) => this.submit(event) },
      element("label", { class: "probe-text" }, "Text, which is cut into windows without begin and end tokens", this.text),
      element("label", {}, "Predict the", this.label), element("label", {}, "Windows of", this.windows),
      element("label", {}, "Tokens per window", this.length), element("button", { id: "probe-start" }, "Fit probes"));
    root.append(element("p", { class: "soft" }, "A probe is a softmax classifier on the output of a layer. The model is frozen, and windows that the probe was not fitted on test it."),
      form, this.error, this.result);
  }

  submit(event) {
    event.preventDefault();
    this.requested = null; // fit again, even if nothing changed
    const before = location.hash;
    write({ text: this.text.value, probe: this.label.value, windows: this.windows.value === "auto" ? null : this.windows.value, window: this.length.value });
    if (location.hash === before) this.load();
  }

  /** Fits the probes that the address asks for, unless they are shown. */
  async load() {
    const { request, wrong } = fromAddress(this.info, this.known);
    if (read().text !== undefined) this.text.value = request.text;
    this.label.value = request.label;
    this.windows.value = request.windows;
    this.length.value = request.length;
    const key = JSON.stringify(request);
    if (read().probe === undefined || key === this.requested) return;
    this.requested = key;
    const isCurrent = this.latest.begin();
    this.error.textContent = wrong;
    this.result.replaceChildren();
    status("computing the outputs of all layers …");
    try {
      await this.fit(isCurrent, request);
    } catch (problem) {
      if (!(problem instanceof ApiError)) throw problem;
      if (isCurrent()) this.error.textContent = problem.message;
    }
    if (isCurrent()) status("");
  }

  async fit(isCurrent, request) {
    const report = await post("probe/start", request);
    const layers = [];
    if (isCurrent()) this.show(report, layers);
    while (isCurrent() && layers.length < report.layers.length) {
      status(`fitting the probe of ${layerName(report.layers[layers.length])}, ${layers.length + 1} of ${report.layers.length} …`);
      layers.push(await getJson(query("probe/layer", { probe: report.probe, index: layers.length })));
      if (isCurrent()) this.show(report, layers);
    }
  }

  show(report, layers) {
    const distances = layers.some((layer) => layer.mean_distance !== null);
    const titles = ["layer", "accuracy", "95 % interval", "chance", "shuffled labels", "untrained model", ...(distances ? ["mean distance"] : [])];
    const rows = layers.map((layer) => [
      layerName(layer.name), percent(layer.accuracy), layer.interval.map(percent).join(" to "), percent(report.chance), percent(layer.shuffled),
      percent(layer.untrained), ...(distances ? [layer.mean_distance.toFixed(2)] : []),
    ]);
    const after = layers.at(-1)?.hash_after ?? null;
    const done = `${report.source}; ${report.classes} labels; ${report.fitted.toLocaleString("en")} tokens fit a probe, ${report.tested.toLocaleString("en")} test it`;
    const repeated = report.repeated ? `. Windows that test a probe and also fit it: ${report.repeated}, so accuracies are optimistic` : "";
    this.result.replaceChildren(element("p", { id: "probe-source" }, `${done}${repeated}.`), chart(report, layers), legend(),
      table("Accuracy on windows that the probe was not fitted on", titles, rows),
      element("p", { id: "probe-hash", class: after === null ? "soft" : after === report.hash_before ? "probe-good" : "probe-error" },
        after === null ? `weights before: sha256 ${report.hash_before.slice(0, 12)}`
          : after === report.hash_before ? `Weights unchanged: sha256 ${after.slice(0, 12)} before and after.` : "The weights changed."));
    this.result.dataset.layers = layers.length;
  }
}

// --------------------------------------------------------------------------------------------------------------- chart

const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);

function chart(report, layers) {
  const width = LEFT + report.layers.length * STEP + 70;
  const root = shape("svg", { class: "probe-chart", viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": "Accuracy of the probe of each layer; the table below has the numbers" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    root.append(shape("line", { class: "grid", x1: LEFT, x2: width - 70, y1: y(share), y2: y(share) }),
      shape("text", { class: "axis", x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`));
  }
  report.layers.forEach((name, i) => root.append(shape("text", { class: "axis", x: LEFT + (i + 0.5) * STEP, y: HEIGHT - 14, "text-anchor": "middle" }, i ? layerName(name).replace("layer ", "") : "embed")));
  layers.forEach((layer, i) => root.append(column(layer, LEFT + (i + 0.5) * STEP)));
  root.append(shape("line", { class: "chance", x1: LEFT, x2: width - 70, y1: y(report.chance), y2: y(report.chance) }),
    shape("text", { class: "axis chance-name", x: width - 66, y: y(report.chance) + 4 }, `chance`));
  return root;
}

/** One layer: a bar with its interval, and the two controls as a cross and a ring. */
function column(layer, x) {
  const [low, high] = layer.interval;
  const cross = y(layer.shuffled);
  return shape("g", {}, shape("title", {}, `${layer.name}: ${percent(layer.accuracy)}`),
    shape("rect", { class: "bar", x: x - 14, width: 28, y: y(layer.accuracy), height: y(0) - y(layer.accuracy) }),
    shape("path", { class: "interval", d: `M${x} ${y(high)}V${y(low)}M${x - 5} ${y(high)}h10M${x - 5} ${y(low)}h10` }),
    shape("path", { class: "shuffled", d: `M${x - 12} ${cross - 4}l8 8m0 -8l-8 8` }),
    shape("circle", { class: "untrained", cx: x + 9, cy: y(layer.untrained), r: 4 }));
}

function legend() {
  const sample = (...shapes) => shape("svg", { class: "probe-chart", width: 20, height: 14, "aria-hidden": "true" }, ...shapes);
  const item = (text, ...shapes) => element("li", {}, sample(...shapes), text);
  return element("ul", { class: "probe-legend" },
    item("accuracy with its 95 % interval", shape("rect", { class: "bar", x: 3, y: 3, width: 14, height: 11 }), shape("path", { class: "interval", d: "M10 0v7" })),
    item("control: shuffled labels", shape("path", { class: "shuffled", d: "M6 3l8 8m0 -8l-8 8" })),
    item("control: the same model with random weights", shape("circle", { class: "untrained", cx: 10, cy: 7, r: 4 })),
    item("chance: the most frequent label", shape("line", { class: "chance", x1: 0, x2: 20, y1: 7, y2: 7 })));
}
