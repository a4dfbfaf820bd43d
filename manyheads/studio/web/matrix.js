// One head as a matrix: a row per query, a column per key. It pans and zooms like a map.

import { label, position, Surface } from "./canvas.js";
import { css, isDarkCell, paint, theme } from "./colors.js";
import { element } from "./dom.js";
import { TILE } from "./source.js";

const [MAX_LEFT, MAX_TOP] = [112, 92]; // room for labels
const [SIN, COS] = [Math.sin(Math.PI / 3), Math.cos(Math.PI / 3)]; // of the angle of the labels of columns
const MAX_SCALE = 46;
const FONT = "12px system-ui, sans-serif";

export class MatrixView {
  // events: hover(cell), choose(cell), cursor(cell), with cells as {row, column} or null
  constructor(name, events) {
    this.events = events;
    this.canvas = element("canvas", {
      class: "matrix", tabindex: "0", role: "img", "aria-label": `${name}: attention matrix; arrow keys move, Enter locks a cell`,
    });
    this.surface = new Surface(this.canvas, (context) => this.draw(context));
    Object.assign(this, { source: null, rows: [], columns: [], cursor: null, locked: null, isolate: "", drag: null, gain: 1, left: 0, top: 0, ends: [] });
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerup", (event) => this.onUp(event));
    this.canvas.addEventListener("pointerleave", () => { if (!this.drag) this.setHover(null); });
    this.canvas.addEventListener("dblclick", () => this.fit());
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  set(source, rows, columns, { keepView = false } = {}) {
    const same = this.source && this.source.rows === source.rows && this.source.columns === source.columns;
    const fitted = this.source && this.scale === this.fitScale();
    Object.assign(this, { source, rows, columns });
    this.measure();
    source.onload = () => { this.surface.redraw(); this.events.loaded?.(); };
    if (!(keepView && same) || fitted || !this.scale) this.fit();
    this.surface.redraw();
  }

  // the room that the labels take: left of the rows, above the columns, and right of the last columns
  measure() {
    const { context } = this.surface;
    context.font = `600 ${FONT}`;
    const width = (text) => context.measureText(text).width;
    const widest = (groups) => Math.max(...[...new Set(groups.map((group) => label(group.label)))].map(width));
    this.left = Math.min(MAX_LEFT, Math.ceil(widest(this.rows)) + 12);
    this.top = Math.min(MAX_TOP, Math.ceil(widest(this.columns) * SIN) + 14);
    this.ends = this.columns.slice(-12).reverse().map((group) => width(label(group.label)) * COS + 6);
  }

  resize(width, height) {
    const fitted = this.source && this.scale === this.fitScale();
    this.surface.resize(width, height);
    if (fitted || !this.scale) this.fit();
  }

  fitScale() {
    const { width, height } = this.surface;
    if (!width || !this.source) return 0;
    const labelled = this.ends.map((end, i) => (width - this.left - end) / (this.source.columns - i - 0.5));
    return Math.min(MAX_SCALE, (width - this.left - 4) / this.source.columns, (height - this.top - 4) / this.source.rows, ...labelled);
  }

  fit() {
    this.scale = this.fitScale();
    [this.x, this.y] = [0, 0];
    this.surface.redraw();
  }

  zoom(factor, atX = (this.left + this.surface.width) / 2, atY = (this.top + this.surface.height) / 2) {
    if (!this.source) return;
    const scale = Math.max(this.fitScale(), Math.min(MAX_SCALE, this.scale * factor));
    const [column, row] = [(atX - this.left) / this.scale + this.x, (atY - this.top) / this.scale + this.y];
    this.scale = scale;
    this.pan(column - (atX - this.left) / scale, row - (atY - this.top) / scale);
  }

  pan(x, y) {
    const across = (this.surface.width - this.left - Math.max(0, this.ends[0] - this.scale / 2)) / this.scale;
    const down = (this.surface.height - this.top) / this.scale;
    this.x = Math.max(0, Math.min(this.source.columns - across, x));
    this.y = Math.max(0, Math.min(this.source.rows - down, y));
    if (across >= this.source.columns) this.x = 0;
    if (down >= this.source.rows) this.y = 0;
    this.surface.redraw();
  }

  cellAt(x, y) {
    if (!this.source || x < this.left || y < this.top) return null;
    const [column, row] = [Math.floor((x - this.left) / this.scale + this.x), Math.floor((y - this.top) / this.scale + this.y)];
    return row < this.source.rows && column < this.source.columns ? { row, column } : null;
  }

  setHover(cell) {
    if (this.locked) return;
    this.cursor = cell;
    this.events.hover?.(cell);
    this.surface.redraw();
  }

  // a view that follows another one
  show(cell, { locked = false } = {}) {
    const inside = cell && this.source && cell.row < this.source.rows && cell.column < this.source.columns;
    this.cursor = inside ? cell : null;
    this.locked = locked && inside ? cell : null;
    this.surface.redraw();
  }

  onWheel(event) {
    event.preventDefault();
    if (event.shiftKey) this.pan(this.x + event.deltaY / this.scale, this.y);
    else this.zoom(Math.exp(-event.deltaY * 0.0015), ...position(event));
  }

  onDown(event) {
    this.canvas.setPointerCapture(event.pointerId);
    const [x, y] = position(event);
    this.drag = { x, y, fromX: this.x, fromY: this.y, moved: false };
  }

  onMove(event) {
    const [x, y] = position(event);
    if (this.drag && (this.drag.moved || Math.hypot(x - this.drag.x, y - this.drag.y) > 4)) {
      this.drag.moved = true;
      this.pan(this.drag.fromX - (x - this.drag.x) / this.scale, this.drag.fromY - (y - this.drag.y) / this.scale);
    } else {
      this.setHover(this.cellAt(x, y));
    }
  }

  onUp(event) {
    const clicked = this.drag && !this.drag.moved;
    this.drag = null;
    if (clicked) this.choose(this.cellAt(...position(event)));
  }

  choose(cell) {
    const again = this.locked && cell && this.locked.row === cell.row && this.locked.column === cell.column;
    this.locked = again ? null : cell;
    this.cursor = cell;
    this.events.choose?.(this.locked);
    this.surface.redraw();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.source) return;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const { rows, columns } = this.source;
    const start = this.cursor ?? { row: 0, column: 0 };
    if (event.key in moves) {
      const step = event.shiftKey ? 10 : 1;
      const [down, right] = moves[event.key];
      const to = this.cursor
        ? { row: clamp(start.row + step * down, rows), column: clamp(start.column + step * right, columns) } : start;
      this.moveTo(to);
    } else if (event.key === "Home") this.moveTo({ row: start.row, column: 0 });
    else if (event.key === "End") this.moveTo({ row: start.row, column: columns - 1 });
    else if (event.key === "Enter") this.choose(start);
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  moveTo(cell) {
    const locked = this.locked !== null;
    this.cursor = cell;
    if (locked) this.locked = cell;
    const across = (this.surface.width - this.left) / this.scale;
    const down = (this.surface.height - this.top) / this.scale;
    if (cell.column < this.x || cell.column >= this.x + across - 1) this.pan(cell.column - across / 2, this.y);
    if (cell.row < this.y || cell.row >= this.y + down - 1) this.pan(this.x, cell.row - down / 2);
    if (locked) this.events.choose?.(cell);
    else this.events.hover?.(cell, true);
    this.surface.redraw();
  }

  // -------------------------------------------------------------------------------------------- drawing

  image(level, row, column) {
    if (this.source.gain !== this.gain) this.source.images.clear(); // painted with another brightness
    this.source.gain = this.gain;
    const id = `${level}/${row}/${column}`;
    const tile = this.source.tile(level, row, column);
    if (!tile) return null;
    if (!this.source.images.has(id)) {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [tile.width, tile.height];
      const pixels = new ImageData(tile.width, tile.height);
      for (let i = 0; i < tile.values.length; i++) paint(pixels.data, 4 * i, tile.values[i] * this.gain);
      canvas.getContext("2d").putImageData(pixels, 0, 0);
      this.source.images.set(id, canvas);
    }
    return this.source.images.get(id);
  }

  draw(context) {
    const { width, height } = this.surface;
    const colors = theme();
    context.clearRect(0, 0, width, height);
    if (!this.source || !this.scale) return;
    this.canvas.dataset.cells = `${this.left} ${this.top} ${this.scale}`; // where they are, for tests of the page
    context.save();
    context.beginPath();
    context.rect(this.left, this.top, width - this.left, height - this.top);
    context.clip();
    this.drawCells(context);
    this.drawLines(context, colors);
    this.drawCursor(context, colors);
    context.restore();
    this.drawLabels(context, colors);
  }

  drawCells(context) {
    const { width, height } = this.surface;
    const level = Math.min(this.source.maxLevel, Math.max(0, Math.ceil(-Math.log2(this.scale * (devicePixelRatio || 1)))));
    const step = TILE * 2 ** level;
    context.imageSmoothingEnabled = false;
    const [lastRow, lastColumn] = [this.y + (height - this.top) / this.scale, this.x + (width - this.left) / this.scale];
    for (let row = Math.floor(this.y / step); row * step < Math.min(lastRow, this.source.rows); row++) {
      for (let column = Math.floor(this.x / step); column * step < Math.min(lastColumn, this.source.columns); column++) {
        const image = this.image(level, row, column);
        const [x, y] = [this.left + (column * step - this.x) * this.scale, this.top + (row * step - this.y) * this.scale];
        const size = this.scale * 2 ** level;
        if (image) context.drawImage(image, x, y, image.width * size, image.height * size);
        else this.drawCoarser(context, level, row, column, x, y, size);
      }
    }
    this.drawNumbers(context);
  }

  // until a tile is here, the part of a coarser one that covers it
  drawCoarser(context, level, row, column, x, y, size) {
    for (let up = 1; level + up <= this.source.maxLevel; up++) {
      const image = this.source.images.get(`${level + up}/${row >> up}/${column >> up}`);
      if (!image) continue;
      const part = TILE >> up;
      const [left, top] = [(column % 2 ** up) * part, (row % 2 ** up) * part];
      const [w, h] = [Math.min(part, image.width - left), Math.min(part, image.height - top)];
      if (w > 0 && h > 0) context.drawImage(image, left, top, w, h, x, y, w * size * 2 ** up, h * size * 2 ** up);
      return;
    }
  }

  drawNumbers(context) {
    if (this.scale < 30 || !this.source.whole) return;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.eachVisible((row, column, x, y) => {
      const value = this.source.value(row, column);
      if (Math.abs(value) < 0.005) return;
      context.fillStyle = isDarkCell(value * this.gain) ? theme().paper : theme().ink;
      context.fillText(value.toFixed(2).replace("0.", "."), x + this.scale / 2, y + this.scale / 2);
    });
  }

  eachVisible(visit) {
    const { width, height } = this.surface;
    for (let row = Math.floor(this.y); row < this.source.rows; row++) {
      const y = this.top + (row - this.y) * this.scale;
      if (y > height) break;
      for (let column = Math.floor(this.x); column < this.source.columns; column++) {
        const x = this.left + (column - this.x) * this.scale;
        if (x > width) break;
        visit(row, column, x, y);
      }
    }
  }

  drawLines(context, colors) {
    const { width, height } = this.surface;
    const [right, bottom] = [this.left + (this.source.columns - this.x) * this.scale, this.top + (this.source.rows - this.y) * this.scale];
    if (this.scale >= 7) {
      context.strokeStyle = colors.line;
      context.lineWidth = 0.5;
      context.beginPath();
      for (let c = Math.ceil(this.x); c <= this.source.columns; c++) {
        const x = this.left + (c - this.x) * this.scale;
        context.moveTo(x, this.top);
        context.lineTo(x, Math.min(height, bottom));
      }
      for (let r = Math.ceil(this.y); r <= this.source.rows; r++) {
        const y = this.top + (r - this.y) * this.scale;
        context.moveTo(this.left, y);
        context.lineTo(Math.min(width, right), y);
      }
      context.stroke();
    }
    context.strokeStyle = colors.line;
    context.lineWidth = 1;
    const [x, y] = [this.left + 0.5 - this.x * this.scale, this.top + 0.5 - this.y * this.scale];
    context.strokeRect(x, y, this.source.columns * this.scale, this.source.rows * this.scale);
  }

  drawCursor(context, colors) {
    const { width, height } = this.surface;
    const [right, bottom] = [this.left + (this.source.columns - this.x) * this.scale, this.top + (this.source.rows - this.y) * this.scale];
    const cell = this.locked ?? this.cursor;
    if (!cell) return;
    const size = Math.max(1, this.scale);
    const [x, y] = [this.left + (cell.column - this.x) * this.scale, this.top + (cell.row - this.y) * this.scale];
    if (this.isolate) {
      context.globalAlpha = 0.86;
      context.fillStyle = colors.paper;
      if (this.isolate === "row") {
        context.fillRect(this.left, this.top, width, y - this.top);
        context.fillRect(this.left, y + size, width, height);
      } else {
        context.fillRect(this.left, this.top, x - this.left, height);
        context.fillRect(x + size, this.top, width, height);
      }
      context.globalAlpha = 1;
    }
    context.strokeStyle = colors.warm;
    context.globalAlpha = 0.6;
    context.strokeRect(this.left - 1, y, right - this.left + 2, size);
    context.strokeRect(x, this.top - 1, size, bottom - this.top + 2);
    context.globalAlpha = 1;
    context.lineWidth = this.locked ? 3 : 2;
    context.setLineDash(this.locked ? [] : [4, 3]); // a cursor is no lock
    context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    context.setLineDash([]);
  }

  drawLabels(context, colors) {
    const { width, height } = this.surface;
    const cell = this.locked ?? this.cursor;
    const every = Math.max(1, Math.ceil(14 / this.scale));
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const write = (group, chosen) => {
      context.fillStyle = chosen ? colors.warm : group.special ? colors.soft : colors.ink;
      context.font = chosen ? `600 ${FONT}` : FONT;
      return label(group.label);
    };
    const shows = (index, chosen) => index === chosen || (index % every === 0 && Math.abs(index - (chosen ?? -1e9)) >= every);
    for (let row = Math.floor(this.y); row < this.source.rows; row++) {
      const y = this.top + (row + 0.5 - this.y) * this.scale;
      if (y > height) break;
      if (y >= this.top && shows(row, cell?.row)) context.fillText(write(this.rows[row], row === cell?.row), this.left - 6, y);
    }
    context.textAlign = "left";
    for (let column = Math.floor(this.x); column < this.source.columns; column++) {
      const x = this.left + (column + 0.5 - this.x) * this.scale;
      if (x > width) break;
      if (x < this.left || !shows(column, cell?.column)) continue;
      context.save();
      context.translate(x, this.top - 6);
      context.rotate(-Math.PI / 3);
      context.fillText(write(this.columns[column], column === cell?.column), 0, 0);
      context.restore();
    }
  }

  // ---------------------------------------------------------------------------------------------- export

  toSvg(svg) {
    const size = Math.max(this.scale, 1);
    const shapes = [];
    for (let row = 0; row < this.source.rows; row++) {
      for (let column = 0; column < this.source.columns; column++) {
        const value = this.source.value(row, column);
        if (!value) continue;
        const cell = svg("rect", { x: this.left + column * size, y: this.top + row * size, width: size, height: size, fill: css(value * this.gain) });
        cell.append(svg("title", {}, `${this.rows[row].label} → ${this.columns[column].label}: ${value.toFixed(5)}`));
        shapes.push(cell);
      }
    }
    if (size >= 7) {
      this.rows.forEach((row, i) => shapes.push(svg("text", { x: this.left - 6, y: this.top + (i + 0.5) * size + 4, "text-anchor": "end" }, label(row.label))));
      this.columns.forEach((column, i) => {
        const x = this.left + (i + 0.5) * size;
        shapes.push(svg("text", { x, y: this.top - 6, transform: `rotate(-60 ${x} ${this.top - 6})` }, label(column.label)));
      });
    }
    const [width, height] = [size * this.source.columns, size * this.source.rows];
    shapes.push(svg("rect", { x: this.left, y: this.top, width, height, fill: "none", stroke: theme().line }));
    return { shapes, width: this.left + width + Math.max(8, this.ends[0] - size / 2), height: this.top + height + 8 };
  }
}

const clamp = (value, size) => Math.max(0, Math.min(size - 1, value));
