// All heads at once: a row per layer, a column per head, with badges and the effect of switching each one off.

import { number, position, Surface } from "./canvas.js";
import { colors, paint, theme } from "./colors.js";
import { element } from "./dom.js";

const [LEFT, TOP, BAR] = [30, 18, 5];
const [MIN_STEP, MAX_STEP] = [15, 58]; // from one head to the next
const KINDS = { self: "self-attention", cross: "cross-attention", alignment: "alignment" };
export const effectUnit = (measure) => (measure === "kl" ? "nats (KL)" : "(1 − cosine)");
export const groupName = (info) => `${info.stack} ${KINDS[info.kind]}`;

export class Grid {
  // patterns: letter and meaning of each badge by its name; events: choose(name, head, open)
  constructor(root, patterns, events) {
    this.root = root;
    this.patterns = patterns;
    this.events = events;
    this.panels = [];
    this.images = new Map();
    this.differences = new Map(); // signed thumbnails, drawn instead if showsDifferences
    this.showsDifferences = false;
    this.values = new Map(); // measures and effects by "name/head"
    this.sort = "layer";
    this.off = new Set();
  }

  set(run) {
    const shape = (shown) => JSON.stringify(shown?.attentions.map((info) => [info.name, info.heads]));
    const changed = shape(this.run) !== shape(run);
    this.run = run;
    for (const map of [this.values, this.images, this.differences]) map.clear();
    if (changed || this.built !== this.sort) this.build();
    this.redraw();
  }

  // heads as large as fit side by side into a width
  fit(width) {
    if (!this.run) return;
    const heads = Math.max(...this.run.attentions.map((info) => info.heads));
    const step = Math.max(MIN_STEP, Math.min(MAX_STEP, Math.floor((width - LEFT) / heads)));
    this.gap = step < 28 ? 3 : 6;
    this.cell = step - this.gap;
    this.redraw();
  }

  heads() {
    return this.run.attentions.flatMap((info) => Array.from({ length: info.heads }, (_, head) => ({ info, head })));
  }

  value(info, head) { return this.values.get(`${info.name}/${head}`) ?? {}; }

  merge(info, head, changes) {
    this.values.set(`${info.name}/${head}`, { ...this.value(info, head), ...changes });
  }

  order(sort) {
    this.sort = sort;
    this.build();
    this.redraw();
  }

  // heads in the order of a measure, or per group of attentions one row per layer
  build() {
    this.built = this.sort;
    this.root.replaceChildren();
    this.panels = [];
    const groups = new Map();
    for (const item of this.heads()) {
      const name = this.sort === "layer" ? groupName(item.info) : "all heads";
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(item);
    }
    for (const [name, heads] of groups) {
      const columns = this.sort === "layer" ? Math.max(...heads.map(({ info }) => info.heads)) : Math.min(12, Math.ceil(Math.sqrt(heads.length)));
      const sorted = this.sort === "layer" ? heads : this.sorted(heads);
      const rows = new Map();
      const placed = sorted.map((item, i) => {
        if (this.sort !== "layer") return { ...item, row: Math.floor(i / columns), column: i % columns };
        if (!rows.has(item.info.name)) rows.set(item.info.name, rows.size);
        return { ...item, row: rows.get(item.info.name), column: item.head };
      });
      this.panels.push(this.panel(name, placed, columns));
    }
  }

  sorted(heads) {
    const [name, sign] = { entropy: ["entropy", 1], distance: ["distance", 1], effect: ["mean", -1] }[this.sort];
    const key = ({ info, head }) => this.value(info, head)[name];
    return [...heads].sort((a, b) => sign * ((key(a) ?? Infinity * sign) - (key(b) ?? Infinity * sign)) || 0);
  }

  panel(name, heads, columns) {
    const canvas = element("canvas", {
      class: "grid", tabindex: "0", role: "img", "aria-label": `${name}: ${heads.length} heads; arrow keys choose a head, Enter opens it`,
    });
    const panel = { name, heads, columns, rows: Math.max(...heads.map((item) => item.row)) + 1, canvas };
    panel.surface = new Surface(canvas, (context) => this.draw(context, panel));
    const at = (event) => {
      const [x, y] = position(event);
      const [column, row] = [Math.floor((x - LEFT) / (this.cell + this.gap)), Math.floor((y - TOP) / (this.cell + this.gap + BAR))];
      return heads.find((item) => item.row === row && item.column === column);
    };
    canvas.addEventListener("pointermove", (event) => { const item = at(event); this.hover(item, panel); });
    canvas.addEventListener("pointerleave", () => this.hover(null, panel));
    canvas.addEventListener("click", (event) => { const item = at(event); if (item) this.events.choose(item.info.name, item.head, false); });
    canvas.addEventListener("keydown", (event) => this.onKey(event, panel));
    this.root.append(element("h3", {}, name), canvas);
    return panel;
  }

  onKey(event, panel) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const current = panel.heads.find((item) => this.isChosen(item)) ?? panel.heads[0];
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      const next = panel.heads.find((item) => item.row === current.row + down && item.column === current.column + right);
      if (next) this.events.choose(next.info.name, next.head, false);
    } else if (event.key === "Enter") this.events.choose(current.info.name, current.head, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  hover(item, panel) {
    panel.canvas.title = item ? this.describe(item.info, item.head) : "";
  }

  describe(info, head) {
    const value = this.value(info, head);
    const parts = [`layer ${info.layer}, head ${head}`];
    if (value.entropy !== undefined) parts.push(`entropy ${number(value.entropy)} nats`, `distance ${number(value.distance)} tokens`);
    if (value.badges?.length) parts.push(value.badges.map((name) => `${this.patterns[name].meaning} ${number(value[name])}`).join(", "));
    if (value.mean !== undefined) parts.push(`effect ${number(value.mean)} ${effectUnit(value.measure)}`);
    if (value.moved !== undefined) parts.push(`${(100 * value.moved).toFixed(1)} % of the weight moved`);
    return parts.join(" · ");
  }

  // what the bar below a head shows
  barOf(value) { return this.showsDifferences ? value.moved : value.mean; }

  isChosen({ info, head }) { return info.name === this.chosen?.name && String(head) === String(this.chosen?.head); }

  setThumbnails(info, bytes) {
    const [height, width] = info.thumbnail;
    const table = colors().weight;
    for (let head = 0; head < info.heads; head++) {
      const part = bytes.subarray(head * width * height, (head + 1) * width * height);
      this.images.set(`${info.name}/${head}`, thumbnail(width, height, (data, i) => {
        const index = 3 * part[i];
        [data[4 * i], data[4 * i + 1], data[4 * i + 2], data[4 * i + 3]] = [table[index], table[index + 1], table[index + 2], 255];
      }));
    }
    this.redraw();
  }

  clearDifferences() {
    this.differences.clear();
    for (const { info, head } of this.heads()) this.merge(info, head, { moved: undefined });
  }

  // the answer of the server: the share of weight that moved per head, and signed thumbnails
  setDifferences(info, buffer) {
    const [height, width] = info.thumbnail;
    const moved = new Float32Array(buffer, 0, info.heads);
    const bytes = new Int8Array(buffer, 4 * info.heads);
    for (let head = 0; head < info.heads; head++) {
      const part = bytes.subarray(head * width * height, (head + 1) * width * height);
      this.differences.set(`${info.name}/${head}`, thumbnail(width, height, (data, i) => paint(data, 4 * i, (part[i] * Math.abs(part[i])) / 127 ** 2)));
      this.merge(info, head, { moved: moved[head] });
    }
    this.redraw();
  }

  redraw() {
    if (!this.cell) return;
    for (const panel of this.panels) {
      panel.surface.resize(LEFT + panel.columns * (this.cell + this.gap), TOP + panel.rows * (this.cell + this.gap + BAR));
    }
  }

  draw(context, panel) {
    const color = theme();
    context.clearRect(0, 0, panel.surface.width, panel.surface.height);
    const largest = Math.max(...this.heads().map(({ info, head }) => this.barOf(this.value(info, head)) ?? 0), 1e-9);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = color.soft;
    const size = this.cell;
    if (this.sort === "layer") {
      context.textAlign = "center";
      for (let column = 0; column < panel.columns; column++) context.fillText(column, LEFT + column * (size + this.gap) + size / 2, TOP / 2);
      context.textAlign = "right";
      for (const item of panel.heads) if (item.column === 0) context.fillText(item.info.layer, LEFT - 8, TOP + item.row * (size + this.gap + BAR) + size / 2);
    }
    for (const item of panel.heads) {
      const [x, y] = [LEFT + item.column * (size + this.gap), TOP + item.row * (size + this.gap + BAR)];
      this.drawHead(context, item, x, y, size, largest, color);
    }
  }

  drawHead(context, item, x, y, size, largest, color) {
    const key = `${item.info.name}/${item.head}`;
    const image = (this.showsDifferences ? this.differences : this.images).get(key);
    const value = this.value(item.info, item.head);
    const bar = this.barOf(value);
    context.imageSmoothingEnabled = image ? image.width > size : false;
    context.fillStyle = color.raised;
    context.fillRect(x, y, size, size);
    if (this.off.has(`${item.info.name}:${item.head}`)) context.globalAlpha = 0.25;
    if (image) context.drawImage(image, x, y, size, size);
    context.globalAlpha = 1;
    context.strokeStyle = this.isChosen(item) ? color.warm : color.line;
    context.lineWidth = this.isChosen(item) ? 2.5 : 1;
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    if (bar !== undefined) {
      context.fillStyle = color.line;
      context.fillRect(x, y + size + 2, size, 3);
      context.fillStyle = color.warm;
      context.fillRect(x, y + size + 2, Math.max(1, size * Math.sqrt(bar / largest)), 3);
    }
    const letters = (value.badges ?? []).map((name) => this.patterns[name].letter);
    if (letters.length && size >= 22) {
      context.font = "600 9px system-ui, sans-serif";
      context.textAlign = "center";
      letters.forEach((letter, i) => {
        const left = x + size - 11 * (i + 1) - 1;
        context.fillStyle = color.warm;
        context.fillRect(left, y + 1, 10, 11);
        context.fillStyle = color.paper;
        context.fillText(letter, left + 5, y + 7);
      });
    }
    if (this.sort !== "layer" && size >= 22) {
      context.font = "9px system-ui, sans-serif";
      context.textAlign = "left";
      const text = `${item.info.kind === "self" ? item.info.stack[0] : item.info.kind[0]}${item.info.layer}.${item.head}`;
      context.fillStyle = color.paper;
      context.fillRect(x + 1, y + size - 11, 5 * text.length + 4, 10);
      context.fillStyle = color.soft;
      context.fillText(text, x + 3, y + size - 6);
    }
  }
}

// a small picture; write(data, i) sets the color of its pixel i
function thumbnail(width, height, write) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const pixels = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) write(pixels.data, i);
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}
