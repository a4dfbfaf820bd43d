// The tab Look: three linked levels, the grid of all heads, one head, one cell.

import { getBytes, getJson, isOffline, post, query } from "./api.js";
import { label, number } from "./canvas.js";
import { showCell } from "./cell.js";
import { element, status } from "./dom.js";
import { savePng, saveSvg } from "./export.js";
import { BADGE_NAMES, Grid, groupName, LETTERS } from "./grid.js";
import { LinesView } from "./lines.js";
import { MatrixView } from "./matrix.js";
import { showNext } from "./next.js";
import { difference, groups, openSource, transformed } from "./source.js";
import { onChange, read, write } from "./state.js";
import { headsTable, matrixTable } from "./table.js";

export const title = "Look";

const KEYS = [
  ["Tab", "next part of the page"], ["arrows", "another head in the grid, another cell in the matrix (Shift: ten)"],
  ["Enter", "open the head, lock the cell"], ["Esc", "release the cell, then back to the grid"],
  ["g / m", "to the grid, to the matrix"], ["r / c", "isolate the row, the column"], ["v", "matrix or lines"], ["+ − 0", "zoom in, out, all"],
  ["[ ]", "previous, next position of the generation"], ["x", "switch the head off or on"], ["t", "tables"], ["?", "this list"],
];
const MODES = { head: "this head", mean: "mean of the layer", max: "maximum of the layer", "all-mean": "mean of all layers", "all-max": "maximum of all layers", rollout: "rollout" };

export async function show(root) {
  const look = new Look(root);
  await look.start();
  return () => look.remove();
}

class Look {
  constructor(root) {
    this.root = root;
    this.runs = new Map(); // by the request that made them
    this.generation = 0;
    this.refreshing = 0;
  }

  async start() {
    this.info = await getJson("look/info");
    this.build();
    this.removals = [onChange(() => this.refresh())];
    this.keys = (event) => this.onKey(event);
    addEventListener("keydown", this.keys);
    this.observer = new ResizeObserver(() => this.layout());
    this.observer.observe(this.views);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => setTimeout(() => this.onScheme());
    this.scheme.addEventListener("change", this.repaint);
    const first = this.info.checkpoints[0];
    document.getElementById("checkpoint").textContent = `${first.path} · ${first.architecture} · ${first.parameters.toLocaleString("en")} parameters`;
    if (read().text === undefined) write({ text: this.info.text || first.examples[0] });
    await this.refresh();
  }

  remove() {
    this.generation++;
    for (const removal of this.removals) removal();
    removeEventListener("keydown", this.keys);
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
  }

  // ------------------------------------------------------------------------------------------------ state

  get state() {
    const s = read();
    return {
      ...s, checkpoint: Number(s.checkpoint ?? 0), add: (s.add ?? "").split(",").filter(Boolean).map(Number),
      off: (s.off ?? "").split(",").filter(Boolean).map((one) => one.split(":")).map(([name, head]) => [name, Number(head)]),
      mass: Number(s.mass ?? 1), temperature: Number(s.temperature ?? 1), mode: s.mode ?? "head", view: s.view ?? "matrix", compare: s.compare ?? "none",
      row: s.row === undefined ? null : Number(s.row), column: s.column === undefined ? null : Number(s.column),
    };
  }

  get attention() { return this.run.attentions.find((one) => one.name === this.state.attention) ?? this.run.attentions.at(-1); }
  get head() { return Math.min(Number(this.state.head ?? 0), this.attention.heads - 1); }
  get shownHead() { return this.state.mode === "head" ? String(this.head) : this.state.mode; }

  command() {
    const { text, ...rest } = read();
    const path = this.info.checkpoints[0].path;
    const quote = (value) => (/^[\w./:=&,+-]+$/.test(value) ? value : `'${value.replaceAll("'", `'"'"'`)}'`);
    const others = this.info.checkpoints.slice(1).map((one) => `--compare ${quote(one.path)}`);
    const state = new URLSearchParams(rest).toString();
    return ["manyheads look", quote(path), quote(text ?? ""), ...others, ...(state ? [`--state ${quote(state)}`] : [])].join(" ");
  }

  // ------------------------------------------------------------------------------------------------- page

  build() {
    const checkpoint = this.info.checkpoints[0];
    this.text = element("textarea", { id: "text", rows: "2", spellcheck: "false", "aria-label": inputLabel(checkpoint), disabled: isOffline, oninput: () => this.typed() });
    this.examples = element("select", { "aria-label": "Examples", disabled: isOffline, onchange: () => this.setText(this.examples.value) },
      element("option", { value: "" }, "examples"), ...checkpoint.examples.map((one) => element("option", { value: one }, label(one, 60))));
    this.generateButton = this.button("Generate", "Continue greedily for 16 tokens", () => this.generate(0));
    this.sampleButton = this.button("Sample", "Continue with 16 tokens drawn at the temperature of the slider", () => this.generate(this.state.temperature));
    this.clearButton = this.button("Clear", "Remove the tokens that were appended", () => write({ add: null, row: null, column: null }));
    this.trust = element("div", { class: "trust", role: "group", "aria-label": "Checks of this run" });
    this.sort = this.select("Sort heads by", { layer: "layer", entropy: "entropy", distance: "distance", effect: "effect" }, "sort");
    this.gridRoot = element("div", { class: "grids" });
    this.grid = new Grid(this.gridRoot, { choose: (name, head, open) => this.chooseHead(name, head, open) });
    this.legend = element("p", { class: "soft legend" });
    this.headTitle = element("h2", {});
    this.mode = this.select("Show", MODES, "mode");
    this.view = this.select("As", { matrix: "matrix", lines: "lines" }, "view");
    this.isolate = this.select("Isolate", { "": "nothing", row: "row", column: "column" }, "isolate");
    this.gain = this.select("Brightness", { 1: "× 1", 10: "× 10", 100: "× 100", 1000: "× 1,000" }, "gain");
    this.compare = this.select("Compare with", this.comparisons(), "compare");
    this.mass = element("input", { type: "range", id: "mass", min: "0.5", max: "1", step: "0.01", "aria-label": "Share of each row's weight that is shown", oninput: () => write({ mass: this.mass.value === "1" ? null : this.mass.value }) });
    this.massText = element("output", {});
    this.special = this.check("hide special tokens", "special");
    this.merge = this.check("merge subwords", "merge");
    this.signed = this.check("difference", "difference");
    this.offButton = this.button("Switch off", "Set this head's output to 0", () => this.toggleOff());
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    const events = { hover: (cell) => this.hover(cell), choose: (cell) => this.lock(cell), loaded: () => this.showReadout() };
    this.a = { matrix: new MatrixView("first", events), lines: new LinesView("first", events) };
    this.b = { matrix: new MatrixView("second", events), lines: new LinesView("second", events) };
    this.views = element("div", { class: "views" });
    this.other = element("div", { class: "other" });
    this.cell = element("section", { class: "cell", "aria-label": "One cell" });
    this.next = element("div", {});
    this.nextTitle = element("h3", {});
    this.position = element("input", { type: "range", min: "0", step: "1", "aria-label": "Position of the generation", oninput: () => write({ position: this.position.value }) });
    this.temperature = element("input", { type: "range", id: "temperature", min: "0.1", max: "3", step: "0.05", "aria-label": "Temperature", oninput: () => write({ temperature: this.temperature.value === "1" ? null : this.temperature.value }) });
    this.temperatureText = element("output", {});
    this.nextPanel = element("section", { class: "nextpanel", "aria-label": "Next tokens" }, this.nextTitle,
      element("label", {}, "position", this.position), element("label", {}, "temperature", this.temperature, this.temperatureText), this.next);
    this.tables = element("section", { class: "tables", hidden: true, "aria-label": "Tables" });
    this.help = element("dialog", { class: "help", "aria-label": "Keys" }, element("h2", {}, "Keys"),
      element("dl", {}, ...KEYS.flatMap(([key, what]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, what)])),
      this.button("Close", "Close this list", () => this.help.close()));
    const zoom = element("span", { class: "zoom", role: "group", "aria-label": "Zoom" }, this.button("+", "Zoom in", () => this.current.zoom(1.5)),
      this.button("−", "Zoom out", () => this.current.zoom(1 / 1.5)), this.button("fit", "Show all", () => this.current.fit()));
    const tools = element("div", { class: "tools" }, this.button("PNG", "Save the picture as PNG", () => savePng(this.current, this.fileName())),
      this.button("SVG", "Save the picture as SVG", () => saveSvg(this.current, this.headTitle.textContent, this.fileName())),
      this.button("Copy command", "Copy the command that opens this state", () => this.copy()),
      this.button("Tables", "Show the same as tables", () => write({ tables: read().tables ? null : "1" })), this.button("?", "Keys", () => this.help.showModal()));
    this.root.append(
      element("div", { class: "look" },
        element("div", { class: "input" }, this.text, element("div", { class: "buttons" }, this.examples, this.generateButton, this.sampleButton, this.clearButton)),
        this.other, this.trust,
        element("div", { class: "levels" },
          element("section", { class: "heads", "aria-label": "All heads" }, element("div", { class: "bar" }, element("h2", {}, "Heads"), this.sort), this.gridRoot, this.legend),
          element("section", { class: "head", "aria-label": "One head" }, element("div", { class: "bar" }, this.headTitle, this.offButton, tools, zoom),
            element("div", { class: "bar controls" }, this.mode, this.view, this.isolate, this.gain, this.compare,
              element("label", {}, "mass", this.mass, this.massText), this.special, this.merge, this.signed),
            this.readout, this.views),
          element("aside", {}, element("h2", {}, "Cell"), this.cell, this.nextPanel)),
        this.tables, this.help));
    if (isOffline) this.root.prepend(element("p", { class: "soft note" }, this.info.left_out));
  }

  comparisons() {
    const made = { none: "nothing", head: "another head", text: "another text" };
    this.info.checkpoints.slice(1).forEach((one, i) => { made[`checkpoint-${i + 1}`] = one.path; });
    made.off = "heads switched off";
    return isOffline ? { none: "nothing", head: "another head" } : made;
  }

  button(text, hint, onclick) { return element("button", { type: "button", title: hint, onclick }, text); }

  select(name, options, key) {
    const node = element("select", { id: `look-${key}`, onchange: () => write({ [key]: node.value === Object.keys(options)[0] ? null : node.value }) },
      ...Object.entries(options).map(([value, text]) => element("option", { value }, text)));
    const made = element("label", {}, name.toLowerCase(), node);
    made.control_ = node;
    return made;
  }

  check(name, key) {
    const node = element("input", { type: "checkbox", id: `look-${key}`, onchange: () => write({ [key]: node.checked ? "1" : null }) });
    const made = element("label", { class: "check" }, node, name);
    made.control_ = node;
    return made;
  }

  // ------------------------------------------------------------------------------------------------- input

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => write({ text: this.text.value, add: null, row: null, column: null, position: null }), 20);
  }

  setText(text) {
    if (!text) return;
    this.examples.value = "";
    write({ text, add: null, row: null, column: null, position: null });
  }

  async generate(temperature) {
    status("generating …");
    try {
      const s = this.state;
      const run = await this.load({ checkpoint: s.checkpoint, text: s.text, add: this.isPair ? [] : s.add, generate: 16, temperature, seed: Math.floor(Math.random() * 1e6) }, false);
      write({ add: run.add.join(","), position: null });
      status("");
    } catch (error) {
      status(error.message);
    }
  }

  get isPair() { return this.info.checkpoints[this.state.checkpoint]?.has_source; }

  async append(id) {
    const at = this.positionNow();
    const texts = this.run.texts;
    const ids = (texts.target ?? texts.text).ids;
    // a token chosen at an earlier position replaces what follows it
    const added = this.isPair ? [...ids.slice(1, at + 1), id] : [...ids.slice(ids.length - this.run.add.length, at + 1), id];
    if (!this.isPair && at + 1 < ids.length - this.run.add.length) {
      status("Only tokens after the text can be replaced; choose the last position.");
      return;
    }
    write({ add: added.join(","), position: null });
  }

  toggleOff() {
    const name = this.attention.name;
    const off = this.state.off;
    const found = off.findIndex(([one, head]) => one === name && head === this.head);
    if (found >= 0) off.splice(found, 1);
    else off.push([name, this.head]);
    write({ off: off.map((one) => one.join(":")).join(",") || null });
  }

  chooseHead(name, head, open) {
    write({ attention: name, head: String(head), mode: null, row: null, column: null });
    if (open) this.current.canvas.focus();
  }

  async copy() {
    const text = this.command();
    try {
      await navigator.clipboard.writeText(text);
      status(`copied: ${text}`);
    } catch {
      status(text); // without permission to copy it is shown
    }
  }

  fileName() { return `attention-${this.attention.name.replaceAll(".", "-")}-${this.shownHead}`; }

  // ---------------------------------------------------------------------------------------------------- runs

  async load(request, keep = true) {
    const key = JSON.stringify(request);
    if (keep && this.runs.has(key)) return this.runs.get(key);
    const run = await post("look/run", request);
    if (keep) this.runs.set(key, run);
    while (this.runs.size > 4) this.runs.delete(this.runs.keys().next().value);
    return run;
  }

  async refresh() {
    const turn = ++this.refreshing;
    const s = this.state;
    if (this.text.value !== (s.text ?? "")) this.text.value = s.text ?? "";
    try {
      const request = { checkpoint: s.checkpoint, text: s.text ?? "", add: s.add, off: [] };
      if (s.target) request.target = s.target;
      const key = JSON.stringify(request);
      const run = await this.load(request);
      if (turn !== this.refreshing) return;
      const isNew = this.run !== run;
      this.run = run;
      this.key = key;
      status("");
      this.showControls(s);
      if (isNew) this.showRun();
      else if (this.grid.sort !== (s.sort ?? "layer")) this.grid.order(s.sort ?? "layer");
      this.grid.chosen = { name: this.attention.name, head: s.mode === "head" ? this.head : null };
      this.grid.off = new Set(s.off.map((one) => one.join(":")));
      this.grid.redraw();
      await Promise.all([this.showHead(turn), this.showNextTokens(turn)]);
    } catch (error) {
      if (turn === this.refreshing) this.fail(error);
    }
  }

  fail(error) {
    if (error.code === "usage.argument" && /no longer held|has ended/.test(error.message)) this.runs.clear();
    status(error.message);
  }

  showControls(s) {
    const set = (control, value) => { control.control_.value = value; };
    set(this.sort, s.sort ?? "layer");
    set(this.mode, s.mode);
    set(this.view, s.view);
    set(this.isolate, s.isolate ?? "");
    set(this.gain, s.gain ?? "1");
    set(this.compare, s.compare);
    this.mass.value = s.mass;
    this.massText.textContent = `${Math.round(s.mass * 100)} %`;
    this.special.control_.checked = Boolean(s.special);
    this.merge.control_.checked = Boolean(s.merge);
    this.signed.control_.checked = Boolean(s.difference);
    this.signed.hidden = s.compare === "none";
    this.temperature.value = s.temperature;
    this.temperatureText.textContent = s.temperature.toFixed(2);
    const isOff = s.off.some(([name, head]) => name === this.attention.name && head === this.head);
    this.offButton.textContent = isOff ? "Switch on" : "Switch off";
    this.offButton.setAttribute("aria-pressed", String(isOff));
    this.offButton.disabled = s.mode !== "head" || isOffline;
    const can = this.info.checkpoints[s.checkpoint]?.can_generate && !isOffline;
    for (const button of [this.generateButton, this.sampleButton]) button.hidden = !can;
    this.clearButton.hidden = !can || !s.add.length;
    const info = this.attention;
    const offs = s.off.length ? ` · ${s.off.length} head${s.off.length > 1 ? "s" : ""} off` : "";
    this.headTitle.textContent = `${groupName(info)} · layer ${info.layer} · ${s.mode === "head" ? `head ${this.head}` : MODES[s.mode]}${offs}`;
    this.tables.hidden = !s.tables;
  }

  // grid: thumbnails first, then measures, then the effect of each head
  async showRun() {
    const turn = ++this.generation;
    const run = this.run;
    this.grid.sort = this.state.sort ?? "layer";
    this.grid.images.clear();
    this.grid.set(run);
    this.grid.fit(this.gridWidth());
    this.trustOf = { row_sum: 0, masked: 0, difference: 0, measured: 0, sha256: this.trustOf?.sha256 };
    this.showTrust();
    this.legend.textContent = "Colour: √weight, the largest of each pixel. Orange bar: how much the output changes without the head.";
    performance.mark("look-run");
    try {
      await Promise.all(run.attentions.map(async (info) => {
        const bytes = new Uint8Array(await getBytes(query("look/thumbnails", { run: run.run, name: info.name })));
        if (turn === this.generation) this.grid.setThumbnails(info, bytes);
      }));
      performance.measure("look-painted", "look-run");
      for (const info of run.attentions) {
        if (turn !== this.generation) return;
        const measured = await getJson(query("look/measures", { run: run.run, name: info.name }));
        if (turn !== this.generation) return;
        measured.heads.forEach((one, head) => this.grid.merge(info, head, one));
        this.addTrust(measured.trust);
        this.grid.redraw();
        this.showLegend();
      }
      this.settle();
      await this.showHash();
      await this.loadEffects(turn, run);
    } catch (error) {
      if (turn === this.generation) this.fail(error);
    }
  }

  async loadEffects(turn, run) {
    for (const { info, head } of this.grid.heads()) {
      if (turn !== this.generation) return;
      const effect = await getJson(query("look/effect", { run: run.run, name: info.name, head }));
      if (turn !== this.generation) return;
      this.grid.merge(info, head, effect);
      this.grid.redraw();
    }
    this.settle();
    this.root.firstElementChild.dataset.effects = "all";
  }

  settle() {
    if (this.grid.sort !== "layer") this.grid.order(this.grid.sort);
    this.showTables();
  }

  showLegend() {
    const present = new Set(this.grid.heads().flatMap(({ info, head }) => this.grid.value(info, head).badges ?? []));
    const names = [...present].map((name) => `${LETTERS[name]} ${BADGE_NAMES[name]} (mean weight ≥ ${this.info.badges[name]})`);
    this.legend.textContent = `Colour: √weight, the largest of each pixel. Orange bar: how much the output changes without the head. ${names.join(" · ")}`;
  }

  async showHash() {
    if (this.trustOf.sha256) return;
    this.trustOf.sha256 = (await getJson(query("look/hash", { checkpoint: this.state.checkpoint }))).sha256;
    this.showTrust();
  }

  addTrust(trust) {
    const t = this.trustOf;
    t.measured++;
    for (const name of ["row_sum", "masked", "difference"]) t[name] = Math.max(t[name], trust[name]);
    t.causal ||= trust.causal;
    this.showTrust();
  }

  showTrust() {
    const t = this.trustOf;
    const total = this.run.attentions.length;
    const checkpoint = this.info.checkpoints[this.state.checkpoint];
    const limit = checkpoint.dtype === "float32" ? 1e-5 : 1e-2;
    const done = t.measured === total ? "" : ` (${t.measured} of ${total} attentions)`;
    const chip = (text, good, hint) => element("span", { class: `chip ${good === null ? "" : good ? "good" : "bad"}`, title: hint }, text);
    this.trust.replaceChildren(
      chip(t.measured ? `row sums 1 ± ${t.row_sum.toExponential(0)}${done}` : "row sums …", t.measured ? t.row_sum < limit : null, "The largest distance of a row's sum from 1"),
      chip(`weight on masked keys ${t.measured ? number(t.masked) : "…"}`, t.measured ? t.masked === 0 : null, "The largest weight on a key that the mask hides; a causal mask hides all keys after the query"),
      chip(`recorded − recomputed ${t.measured ? t.difference.toExponential(0) : "…"}`, t.measured ? t.difference < limit : null, "The largest difference between weights × values, computed now, and what the fused kernel gave in this run"),
      chip(checkpoint.dtype, null, "Precision of the weights of the model"),
      chip(t.sha256 ? `sha256 ${t.sha256.slice(0, 12)}` : "sha256 …", null, t.sha256 ?? "Hash of the weights"),
    );
  }

  // -------------------------------------------------------------------------------------------------- head

  get current() { return this.a[this.state.view === "lines" ? "lines" : "matrix"]; }

  options(s) { return { hideSpecial: Boolean(s.special), merge: Boolean(s.merge) }; }

  async shown(run, info, head, s) {
    const source = await this.source(run, info, head);
    const rows = groups(run.texts[info.queries], info.rows, source.whole ? this.options(s) : {});
    const columns = groups(run.texts[info.keys], info.columns, source.whole ? this.options(s) : {});
    const isPlain = !source.whole || (!s.special && !s.merge && s.mass >= 1);
    return { source: isPlain ? source : transformed(source, rows, columns, s.mass), rows, columns, run, info };
  }

  async source(run, info, head) {
    const key = `${run.run}/${info.name}/${head}`;
    this.sources ??= new Map();
    if (!this.sources.has(key)) {
      this.sources.set(key, openSource(run, info, head));
      this.sources.get(key).catch(() => this.sources.delete(key));
      while (this.sources.size > 6) this.sources.delete(this.sources.keys().next().value);
    }
    return this.sources.get(key);
  }

  async showHead(turn) {
    const s = this.state;
    const [a, b] = await Promise.all([this.shown(this.run, this.attention, this.shownHead, s), this.second(s)]);
    if (turn !== this.refreshing) return;
    this.large = !a.source.whole;
    for (const control of [this.special.control_, this.merge.control_, this.mass]) control.disabled = this.large;
    this.shownA = a;
    this.shownB = b;
    const comparable = b && a.source.whole && b.source.whole && a.source.rows === b.source.rows && a.source.columns === b.source.columns;
    this.signed.control_.disabled = !comparable;
    const isDifference = comparable && s.difference;
    const [first, second] = [this.current, this.b[s.view === "lines" ? "lines" : "matrix"]];
    const canvases = [first.canvas, ...(b && !isDifference ? [second.canvas] : [])];
    if (canvases.length !== this.views.children.length || canvases.some((one, i) => one !== this.views.children[i])) {
      const focused = this.views.contains(document.activeElement);
      this.views.replaceChildren(...canvases);
      if (focused) first.canvas.focus();
    }
    const keepView = this.shape === `${a.source.rows}×${a.source.columns}`;
    this.shape = `${a.source.rows}×${a.source.columns}`;
    first.set(isDifference ? difference(a.source, b.source) : a.source, a.rows, a.columns, { keepView });
    if (canvases.length > 1) second.set(b.source, b.rows, b.columns);
    for (const view of [first, second]) {
      view.isolate = s.isolate ?? "";
      view.gain = Number(s.gain ?? 1);
      view.surface.redraw();
    }
    this.layout();
    const cell = s.row !== null && s.row < a.source.rows ? { row: s.row, column: s.column } : null;
    first.show(cell ?? first.cursor, { locked: cell !== null });
    if (canvases.length > 1) second.show(cell ?? first.cursor, { locked: cell !== null });
    this.showReadout();
    this.showTables();
    await this.showWhy(cell);
  }

  // what is compared with the head: {run, info, head} of another head, text, checkpoint, or without some heads
  async second(s) {
    this.showOther(s);
    if (s.compare === "none") return null;
    const request = { checkpoint: s.checkpoint, text: s.text ?? "", add: s.add, off: [] };
    if (s.compare === "head") return this.shown(this.run, this.attentionNamed(this.run, s.attention2), s.head2 ?? "0", s);
    if (s.compare === "text") Object.assign(request, { text: s.text2 ?? s.text, add: [] });
    if (s.compare.startsWith("checkpoint")) request.checkpoint = Number(s.compare.split("-")[1]);
    if (s.compare === "off") request.off = s.off;
    const run = await this.load(request);
    return this.shown(run, this.attentionNamed(run, this.attention.name), this.shownHead, s);
  }

  attentionNamed(run, name) { return run.attentions.find((one) => one.name === name) ?? run.attentions.at(-1); }

  showOther(s) {
    if (this.otherShown === s.compare && s.compare !== "head") return;
    if (this.otherShown !== s.compare || s.compare === "head") this.other.replaceChildren();
    this.otherShown = s.compare;
    if (s.compare === "text") {
      const field = element("textarea", { id: "text2", rows: "1", "aria-label": "Second text", oninput: () => {
        clearTimeout(this.typing2);
        this.typing2 = setTimeout(() => write({ text2: field.value }), 60);
      } });
      field.value = s.text2 ?? s.text;
      this.other.append(element("label", {}, "second text", field));
    } else if (s.compare === "head") {
      const chosen = `${this.attentionNamed(this.run, s.attention2).name}/${s.head2 ?? "0"}`;
      const node = element("select", { id: "head2", onchange: () => { const [attention2, head2] = node.value.split("/"); write({ attention2, head2 }); } },
        ...this.grid.heads().map(({ info, head }) => element("option", { value: `${info.name}/${head}` }, `${groupName(info)} · layer ${info.layer} · head ${head}`)));
      node.value = chosen;
      this.other.append(element("label", {}, "second head", node));
    } else if (s.compare === "off") {
      this.other.append(element("p", { class: "soft" }, "Right: the same head in a run without the heads that are switched off."));
    }
  }

  // a third of the page, or all of it where the levels are below each other
  gridWidth() { return Math.max(224, this.root.clientWidth * (innerWidth <= 1100 ? 1 : 0.35) - 15); }

  layout() {
    if (this.run) this.grid.fit(this.gridWidth());
    const count = Math.max(1, this.views.children.length);
    const width = Math.floor((this.views.clientWidth - 12 * (count - 1)) / count);
    if (width < 50) return;
    const height = Math.round(Math.max(320, Math.min(innerHeight - 210, width + 0)));
    for (const view of [this.a.matrix, this.a.lines, this.b.matrix, this.b.lines]) {
      if (this.views.contains(view.canvas) && (view.surface.width !== width || view.surface.height !== height)) view.resize(width, height);
    }
  }

  onScheme() {
    this.sources?.clear();
    for (const view of [this.a, this.b]) for (const one of Object.values(view)) { one.source?.images.clear(); one.surface.redraw(); }
    this.showRun();
  }

  hover(cell) {
    const others = [this.a.matrix, this.a.lines, this.b.matrix, this.b.lines];
    for (const view of others) if (this.views.contains(view.canvas) && !view.locked && view.cursor !== cell) view.show(cell);
    this.hovered = cell;
    this.showReadout();
  }

  lock(cell) {
    write({ row: cell?.row ?? null, column: cell?.column ?? null, ...(cell?.row != null && this.followsRow() ? { position: this.tokenOf(cell.row) } : {}) });
  }

  followsRow() { return this.run.generates && this.attention.queries !== "source"; }
  tokenOf(row) { return this.shownA.rows[row].tokens.at(-1); }

  showReadout() {
    const cell = this.current.locked ?? this.current.cursor;
    if (!cell || !this.shownA) {
      this.readout.textContent = "Move over a cell for its weight.";
      return;
    }
    const { rows, columns } = this.shownA;
    const source = this.current.source;
    if (cell.row === null || cell.column === null) {
      this.readout.textContent = cell.row === null ? `key ${label(columns[cell.column].label, 30)}` : `query ${label(rows[cell.row].label, 30)}`;
      return;
    }
    const value = source.value(cell.row, cell.column);
    const second = this.views.children.length > 1 && this.shownB && cell.row < this.shownB.source.rows && cell.column < this.shownB.source.columns
      ? ` · second: ${precise(this.shownB.source.value(cell.row, cell.column))}` : "";
    this.readout.textContent = `${this.current.locked ? "locked: " : ""}${label(rows[cell.row].label, 30)} → ${label(columns[cell.column].label, 30)}: ${precise(value)}${second}`;
  }

  async showWhy(cell) {
    const s = this.state;
    const { rows, columns } = this.shownA;
    if (!cell || cell.column === null || s.mode !== "head") {
      showCell(this.cell, null);
      if (cell && s.mode !== "head") this.cell.replaceChildren(element("p", { class: "soft" }, "One cell is explained for one head; choose “this head”."));
      return;
    }
    const [row, column] = [rows[cell.row].tokens.at(-1), columns[cell.column].tokens[0]];
    const path = query("look/cell", { run: this.run.run, name: this.attention.name, head: this.head, row, column });
    if (this.why === path) return;
    this.why = path;
    try {
      const why = await getJson(path);
      if (this.why === path) showCell(this.cell, why, { query: rows[cell.row].label, key: columns[cell.column].label });
    } catch (error) {
      this.cell.replaceChildren(element("p", { class: "soft" }, error.message));
    } finally {
      if (this.why === path) this.why = null;
    }
  }

  // ------------------------------------------------------------------------------------------------- next tokens

  positionNow() {
    const length = (this.run.texts.target ?? this.run.texts.text).tokens.length;
    const given = this.state.position;
    return given === undefined ? length - 1 : Math.max(0, Math.min(length - 1, Number(given)));
  }

  async showNextTokens(turn) {
    const output = this.info.checkpoints[this.state.checkpoint].output;
    this.nextPanel.hidden = !["tokens", "classes"].includes(output);
    if (this.nextPanel.hidden) return;
    const s = this.state;
    const text = this.run.texts.target ?? this.run.texts.text ?? this.run.texts.source;
    const at = this.positionNow();
    this.position.max = text.tokens.length - 1;
    this.position.value = at;
    const isMasked = output === "tokens" && !this.info.checkpoints[s.checkpoint].can_generate;
    this.nextTitle.textContent = output === "classes" ? "Classes" : `${isMasked ? "Token at" : "Next token after"} ${label(text.tokens[at], 18)} (${at})`;
    try {
      const next = await getJson(query("look/next", { run: this.run.run, position: at }));
      let without = null;
      if (s.off.length) {
        const run = await this.load({ checkpoint: s.checkpoint, text: s.text ?? "", add: this.run.add, off: s.off });
        without = await getJson(query("look/next", { run: run.run, position: at }));
      }
      if (turn !== this.refreshing) return;
      const choose = this.info.checkpoints[s.checkpoint].can_generate && !isOffline ? (id) => this.append(id) : null;
      showNext(this.next, next, without, s.temperature, choose);
    } catch (error) {
      this.next.replaceChildren(element("p", { class: "soft" }, error.message));
    }
  }

  // -------------------------------------------------------------------------------------------------- tables, keys

  showTables() {
    if (!this.state.tables || !this.shownA) return;
    this.tables.replaceChildren(matrixTable(this.headTitle.textContent, this.shownA.source, this.shownA.rows, this.shownA.columns), headsTable(this.grid));
  }

  onKey(event) {
    if (event.target.matches("textarea, input, select") || event.ctrlKey || event.metaKey || event.altKey || this.help.open) {
      if (event.key === "Escape" && event.target.matches("textarea")) event.target.blur();
      return;
    }
    const actions = {
      "?": () => this.help.showModal(),
      g: () => this.gridCanvas().focus(),
      m: () => this.current.canvas.focus(),
      v: () => write({ view: this.state.view === "lines" ? null : "lines" }),
      r: () => write({ isolate: this.state.isolate === "row" ? null : "row" }),
      c: () => write({ isolate: this.state.isolate === "column" ? null : "column" }),
      t: () => write({ tables: read().tables ? null : "1" }),
      x: () => { if (!this.offButton.disabled) this.toggleOff(); },
      "[": () => write({ position: Math.max(0, this.positionNow() - 1) }),
      "]": () => write({ position: this.positionNow() + 1 }),
      Escape: () => this.release(),
    };
    if (!(event.key in actions) || !this.run) return;
    event.preventDefault();
    actions[event.key]();
  }

  gridCanvas() { return this.grid.panels.find((panel) => panel.heads.some((one) => this.grid.isChosen(one)))?.canvas ?? this.grid.panels[0].canvas; }

  release() {
    if (this.state.row !== null || this.state.column !== null) {
      for (const view of [...Object.values(this.a), ...Object.values(this.b)]) view.show(null);
      write({ row: null, column: null });
    } else this.gridCanvas().focus();
  }
}

const precise = (value) => (value === undefined ? "…" : value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(4) : value.toFixed(6));

function inputLabel(checkpoint) {
  return { text: checkpoint.has_source ? "Source text" : "Text", ids: "Token ids, as numbers", image: "Pixels from 0 to 1, as numbers" }[checkpoint.reads];
}
