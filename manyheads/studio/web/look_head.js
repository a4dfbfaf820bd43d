// The second and third level: one head as matrix or lines, beside what it is compared with, and why a cell has its weight.

import { getJson, isOffline, query } from "./api.js";
import { label } from "./canvas.js";
import { showCell } from "./cell.js";
import { element } from "./dom.js";
import { savePng, saveSvg } from "./export.js";
import { groupName } from "./grid.js";
import { Latest } from "./latest.js";
import { LinesView } from "./lines.js";
import { button, Controls, MODES } from "./look_controls.js";
import { comparisons } from "./look_state.js";
import { MatrixView } from "./matrix.js";
import { PictureView } from "./picture.js";
import { difference, groups, transformed } from "./source.js";
import { write } from "./state.js";

export class HeadPanel {
  constructor(look) {
    this.look = look;
    this.latestCell = new Latest();
    this.title = element("h2", {});
    this.offButton = button("Switch off", "Set this head's output to 0", () => this.toggleOff());
    this.controls = new Controls(comparisons(look.info));
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    const events = { hover: (cell) => this.hover(cell), choose: (cell) => this.lock(cell), loaded: () => this.showReadout() };
    this.first = { matrix: new MatrixView("first", events), lines: new LinesView("first", events) };
    this.second = { matrix: new MatrixView("second", events), lines: new LinesView("second", events) };
    this.views = element("div", { class: "views" });
    this.picture = new PictureView({ hover: (patch) => this.hover(this.cellOf(patch)), choose: (patch) => this.lock(this.cellOf(patch)) });
    this.reading = element("p", { class: "soft reading", hidden: true }, "A row is a token that was read; what it attends to predicts the token after it.");
    this.cell = element("section", { class: "cell", "aria-label": "One cell" });
    this.root = element("section", { class: "head", "aria-label": "One head" },
      element("div", { class: "bar" }, this.title, this.offButton, this.tools(), this.zoom()), this.controls.root, this.readout, this.views, this.reading);
  }

  tools() {
    const name = () => `attention-${this.look.attention.name.replaceAll(".", "-")}-${this.look.shownHead}`;
    return element("div", { class: "tools" }, button("PNG", "Save the picture as PNG", () => savePng(this.current, this.title.textContent, name())),
      button("SVG", "Save the picture as SVG", () => saveSvg(this.current, this.title.textContent, name())),
      button("Copy command", "Copy the command that opens this state", () => this.look.copy()),
      button("Tables", "Show the same as tables", () => write({ tables: this.look.state.tables ? null : "1" })),
      button("?", "Keys", () => this.look.help.showModal()));
  }

  zoom() {
    return element("span", { class: "zoom", role: "group", "aria-label": "Zoom" }, button("+", "Zoom in", () => this.current.zoom(1.5)),
      button("−", "Zoom out", () => this.current.zoom(1 / 1.5)), button("fit", "Show all", () => this.current.fit()));
  }

  get current() { return this.first[this.look.state.view === "lines" ? "lines" : "matrix"]; }
  get all() { return [...Object.values(this.first), ...Object.values(this.second)]; }
  get visible() { return this.all.filter((view) => this.views.contains(view.canvas)); }

  // -------------------------------------------------------------------------------------------- showing

  showControls(s) {
    const { attention, head } = this.look;
    this.controls.show(s);
    const isOff = s.off.some(([name, number]) => name === attention.name && number === head);
    this.offButton.textContent = isOff ? "Switch on" : "Switch off";
    this.offButton.setAttribute("aria-pressed", String(isOff));
    this.offButton.disabled = s.mode !== "head" || isOffline;
    this.reading.hidden = !this.look.info.checkpoints[s.checkpoint].can_generate || attention.queries === "source";
    const offs = s.off.length ? ` · ${s.off.length} head${s.off.length > 1 ? "s" : ""} off` : "";
    this.title.textContent = `${groupName(attention)} · layer ${attention.layer} · ${s.mode === "head" ? `head ${head}` : MODES[s.mode]}${offs}`;
  }

  // a matrix with its tokens, regrouped as the state says
  async load(run, info, head, s) {
    const source = await this.look.runs.source(run, info, head);
    const options = source.whole ? { hideSpecial: Boolean(s.special), merge: Boolean(s.merge) } : {};
    const rows = groups(run.texts[info.queries], info.rows, options);
    const columns = groups(run.texts[info.keys], info.columns, options);
    const isPlain = !source.whole || (!s.special && !s.merge && s.mass >= 1);
    return { source: isPlain ? source : transformed(source, rows, columns, s.mass), rows, columns };
  }

  async show(s, isCurrent) {
    const { look } = this;
    look.compare.show(s);
    const [a, b] = await Promise.all([
      this.load(look.run, look.attention, look.shownHead, s), look.compare.second(s).then((other) => (other ? this.load(...other, s) : null)),
    ]);
    if (!isCurrent()) return;
    const comparable = Boolean(b) && a.source.whole && b.source.whole && shapeOf(a) === shapeOf(b);
    this.controls.enable({ whole: a.source.whole, comparable });
    Object.assign(this, { a, b });
    this.showPicture(s);
    this.draw(s, comparable && Boolean(s.difference));
    const isInside = s.row !== null && s.row < a.source.rows && (s.column ?? 0) < a.source.columns;
    const cell = isInside ? { row: s.row, column: s.column } : null;
    for (const view of this.visible) view.show(cell ?? this.current.cursor, { locked: cell !== null });
    this.showReadout();
    look.showTables();
    await this.showWhy(cell, s);
  }

  draw(s, isDifference) {
    const { a, b } = this;
    const [first, second] = [this.current, this.second[s.view === "lines" ? "lines" : "matrix"]];
    this.place([first.canvas, ...(b && !isDifference ? [second.canvas] : [])]);
    const keepView = this.shape === shapeOf(a);
    this.shape = shapeOf(a);
    first.set(isDifference ? difference(a.source, b.source) : a.source, a.rows, a.columns, { keepView });
    if (b && !isDifference) second.set(b.source, b.rows, b.columns);
    for (const view of [first, second]) {
      Object.assign(view, { isolate: s.isolate, gain: s.gain });
      view.surface.redraw();
    }
    this.layout();
  }

  place(canvases) {
    if (canvases.length === this.views.children.length && canvases.every((canvas, i) => canvas === this.views.children[i])) return;
    const focused = this.views.contains(document.activeElement);
    this.views.replaceChildren(...canvases);
    if (focused) canvases[0].focus();
  }

  layout() {
    const count = Math.max(1, this.views.children.length);
    const width = Math.floor((this.views.clientWidth - 12 * (count - 1)) / count);
    if (width < 50) return;
    const top = this.views.getBoundingClientRect().top + scrollY;
    const least = this.look.state.view === "lines" ? 400 : Math.min(400, width); // a narrow matrix is no taller than wide
    const height = Math.round(Math.max(least, Math.min(innerHeight - top - 24, width)));
    for (const view of this.visible) if (view.surface.width !== width || view.surface.height !== height) view.resize(width, height);
  }

  // in the colors of another scheme
  repaint() {
    for (const view of this.all) {
      view.source?.images.clear();
      view.surface.redraw();
    }
  }

  // --------------------------------------------------------------------------------------------- choosing

  toggleOff() {
    if (this.offButton.disabled) return;
    const { state: { off }, attention: { name }, head } = this.look;
    const rest = off.filter(([offName, offHead]) => offName !== name || offHead !== head);
    if (rest.length === off.length) rest.push([name, head]);
    write({ off: rest.map((pair) => pair.join(":")).join(",") || null });
  }

  hover(cell) {
    for (const view of this.visible) if (!view.locked && view.cursor !== cell) view.show(cell);
    this.showReadout();
  }

  // the position of the next token follows a query that generates one
  lock(cell) {
    const follows = cell?.row != null && this.look.run.generates && this.look.attention.queries !== "source";
    write({ row: cell?.row ?? null, column: cell?.column ?? null, ...(follows ? { position: this.a.rows[cell.row].tokens.at(-1) } : {}) });
  }

  // of another run it would point at other tokens
  clearCursor() { for (const view of this.all) view.show(null); }

  // whether there was a cell to release
  release() {
    const { row, column } = this.look.state;
    if (row === null && column === null) return false;
    this.clearCursor();
    write({ row: null, column: null });
    return true;
  }

  // -------------------------------------------------------------------------------------------- one cell

  showPicture(s) {
    const { image } = this.look.run.texts[this.look.attention.queries];
    if (this.pictured === this.look.run.run) return;
    this.pictured = this.look.run.run;
    this.picture.set(image, s.text);
  }

  // a patch of the picture as a query, with the key that it attends to most
  cellOf(patch) {
    if (patch === null) return null;
    const { source, rows, columns } = this.a;
    const row = rows.findIndex((group) => group.patch === patch);
    const weights = columns.map((_, column) => source.value(row, column) ?? 0);
    return row < 0 ? null : { row, column: weights.indexOf(Math.max(...weights)) };
  }

  // the row of a cell by patch; of a matrix in tiles, only its query and key
  patchesOf(cell) {
    const { rows, columns } = this.a;
    const [from, to] = [rows[cell.row], columns[cell.column]];
    if (!from || !to) return null;
    const weights = [];
    columns.forEach(({ patch }, column) => { if (patch >= 0 && this.current.source.whole) weights[patch] = this.current.source.value(cell.row, column) ?? 0; });
    return { weights, largest: Math.max(0, ...weights.map(Math.abs)), query: from.patch, key: to.patch, names: [from.label, to.label] };
  }

  showReadout() {
    const view = this.current;
    const cell = view.locked ?? view.cursor;
    if (this.picture.isShown) this.picture.show(cell && this.a ? this.patchesOf(cell) : null);
    if (!cell || !this.a) {
      this.readout.textContent = "Move over a cell for its weight.";
      return;
    }
    const [from, to] = [this.a.rows[cell.row], this.a.columns[cell.column]].map((group) => group && label(group.label, 30));
    if (!from || !to) {
      this.readout.textContent = from ? `query ${from}` : `key ${to}`;
      return;
    }
    const other = this.views.children.length > 1 ? this.b.source : null;
    const isShared = other && cell.row < other.rows && cell.column < other.columns;
    const second = isShared ? ` · second: ${precise(other.value(cell.row, cell.column))}` : "";
    this.readout.textContent = `${view.locked ? "locked: " : ""}${from} → ${to}: ${precise(view.source.value(cell.row, cell.column))}${second}`;
  }

  async showWhy(cell, s) {
    const { rows, columns } = this.a;
    const isCurrent = this.latestCell.begin();
    if (!cell || cell.column === null) showCell(this.cell, null);
    else if (s.mode !== "head") this.cell.replaceChildren(element("p", { class: "soft" }, "One cell is explained for one head; choose “this head”."));
    else {
      const { run, attention, head } = this.look;
      const place = { row: rows[cell.row].tokens.at(-1), column: columns[cell.column].tokens[0] };
      try {
        const why = await getJson(query("look/cell", { run: run.run, name: attention.name, head, ...place }));
        if (isCurrent()) showCell(this.cell, why, { query: rows[cell.row].label, key: columns[cell.column].label });
      } catch (error) {
        if (isCurrent()) this.cell.replaceChildren(element("p", { class: "soft" }, error.message));
      }
    }
  }
}

const shapeOf = ({ source }) => `${source.rows}×${source.columns}`;
const precise = (value) => (value === undefined ? "…" : value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(4) : value.toFixed(6));
