// One head as lines from queries to keys, as wide and dark as the weight.

import { label, position, Surface } from "./canvas.js";
import { theme } from "./colors.js";
import { element } from "./dom.js";

const [STEP, TOP] = [22, 14];
const LEAST = 0.02; // thinner lines are not drawn, unless their token is chosen
const MANY = 80; // tokens from which only the lines of the chosen token are drawn

export class LinesView {
  constructor(name, events) {
    this.events = events;
    this.canvas = element("canvas", {
      class: "lines", tabindex: "0", role: "img", "aria-label": `${name}: lines from queries to keys; arrow keys choose a query, Enter locks`,
    });
    this.surface = new Surface(this.canvas, (context) => this.draw(context));
    Object.assign(this, { source: null, rows: [], columns: [], cursor: null, locked: null, isolate: "", y: 0 });
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => this.setCursor(null));
    this.canvas.addEventListener("click", (event) => this.choose(this.tokenAt(...position(event))));
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  set(source, rows, columns) {
    Object.assign(this, { source, rows, columns });
    source.onload = () => this.surface.redraw();
    this.y = Math.min(this.y, this.limit());
    this.surface.redraw();
  }

  get side() { return Math.max(Math.min(150, this.surface.width / 3), (this.surface.width - 460) / 2); }

  limit() { return Math.max(0, Math.max(this.rows.length, this.columns.length) * STEP - (this.surface.height ?? 0) + 2 * TOP); }

  resize(width, height) { this.surface.resize(width, height); }
  fit() { this.y = 0; this.surface.redraw(); }
  zoom() {}

  tokenAt(x, y) {
    const index = Math.floor((y - TOP + this.y) / STEP);
    if (x < this.side + 30 && index >= 0 && index < this.rows.length) return { row: index, column: null };
    if (x > this.surface.width - this.side - 30 && index >= 0 && index < this.columns.length) return { row: null, column: index };
    return null;
  }

  onMove(event) { if (!this.locked) this.setCursor(this.tokenAt(...position(event))); }

  setCursor(cell) {
    if (this.locked) return;
    this.cursor = cell;
    this.events.hover?.(cell);
    this.surface.redraw();
  }

  show(cell, { locked = false } = {}) {
    this.cursor = cell;
    this.locked = locked ? cell : null;
    this.surface.redraw();
  }

  choose(cell) {
    this.locked = this.locked ? null : cell;
    this.cursor = cell;
    this.events.choose?.(this.locked);
    this.surface.redraw();
  }

  onWheel(event) {
    event.preventDefault();
    this.y = Math.max(0, Math.min(this.limit(), this.y + event.deltaY));
    this.surface.redraw();
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = this.cursor?.row ?? -1;
    if (step) {
      const cell = { row: Math.max(0, Math.min(this.rows.length - 1, row + step)), column: null };
      if (this.locked) this.locked = cell;
      this.cursor = cell;
      const y = cell.row * STEP;
      if (y < this.y || y > this.y + this.surface.height - 2 * STEP) this.y = Math.max(0, Math.min(this.limit(), y - this.surface.height / 2));
      this.events.hover?.(cell, true);
      this.surface.redraw();
    } else if (event.key === "Enter") this.choose(this.cursor ?? { row: 0, column: null });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // calls visit(row, column, value) for the lines that are shown
  each(visit) {
    const chosen = this.locked ?? this.cursor;
    const all = Math.max(this.rows.length, this.columns.length) <= MANY;
    for (let row = 0; row < this.rows.length; row++) {
      if (chosen && chosen.row !== null && chosen.row !== row) continue;
      if (!chosen && !all) return;
      for (let column = 0; column < this.columns.length; column++) {
        if (chosen && chosen.column !== null && chosen.row === null && chosen.column !== column) continue;
        const value = this.source.value(row, column);
        if (value && Math.abs(value) >= (chosen ? LEAST / 10 : LEAST)) visit(row, column, value);
      }
    }
  }

  draw(context) {
    const { width, height } = this.surface;
    const colors = theme();
    context.clearRect(0, 0, width, height);
    if (!this.source) return;
    const at = (index) => TOP + (index + 0.5) * STEP - this.y;
    const [left, right] = [this.side + 8, width - this.side - 8];
    this.each((row, column, value) => {
      context.strokeStyle = value < 0 ? colors.warm : colors.accent;
      context.globalAlpha = Math.min(1, 0.08 + 0.92 * Math.abs(value));
      context.lineWidth = 0.6 + 3.4 * Math.abs(value);
      context.beginPath();
      context.moveTo(left, at(row));
      context.bezierCurveTo(left + (right - left) * 0.35, at(row), right - (right - left) * 0.35, at(column), right, at(column));
      context.stroke();
    });
    context.globalAlpha = 1;
    context.textBaseline = "middle";
    const chosen = this.locked ?? this.cursor;
    const write = (group, index, side, isChosen) => {
      const y = at(index);
      if (y < -STEP || y > height + STEP) return;
      context.font = isChosen ? "600 13px system-ui, sans-serif" : "13px system-ui, sans-serif";
      context.fillStyle = isChosen ? colors.warm : group.special ? colors.soft : colors.ink;
      context.textAlign = side === "left" ? "right" : "left";
      context.fillText(label(group.label, 20), side === "left" ? this.side : width - this.side, y);
    };
    this.rows.forEach((group, i) => write(group, i, "left", chosen?.row === i));
    this.columns.forEach((group, i) => write(group, i, "right", chosen?.row === null && chosen?.column === i));
  }

  toSvg(svg) {
    const width = this.surface.width;
    const at = (index) => TOP + (index + 0.5) * STEP;
    const shapes = [];
    this.each((row, column, value) => {
      shapes.push(svg("line", {
        x1: this.side + 8, y1: at(row), x2: width - this.side - 8, y2: at(column), stroke: theme().accent,
        "stroke-opacity": Math.min(1, 0.08 + 0.92 * Math.abs(value)).toFixed(3), "stroke-width": (0.6 + 3.4 * Math.abs(value)).toFixed(2),
      }));
    });
    this.rows.forEach((group, i) => shapes.push(svg("text", { x: this.side, y: at(i) + 4, "text-anchor": "end" }, label(group.label, 20))));
    this.columns.forEach((group, i) => shapes.push(svg("text", { x: width - this.side, y: at(i) + 4 }, label(group.label, 20))));
    return { shapes, width, height: 2 * TOP + STEP * Math.max(this.rows.length, this.columns.length) };
  }
}
