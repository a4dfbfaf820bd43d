// The picture that a model reads, with its patches: the attention of a query is drawn over it, the query and the key are outlined.

import { number, position, Surface } from "./canvas.js";
import { theme } from "./colors.js";
import { element } from "./dom.js";

const MAX_WIDTH = 320;

export class PictureView {
  // events: hover(token), choose(token) of a patch, or of null
  constructor(events) {
    this.canvas = element("canvas", { class: "picture", role: "img" });
    this.caption = element("p", { class: "soft" });
    this.root = element("section", { class: "picturepanel", hidden: true, "aria-label": "Picture" }, element("h2", {}, "Picture"), this.canvas, this.caption);
    this.surface = new Surface(this.canvas, (context) => this.draw(context));
    this.canvas.addEventListener("pointermove", (event) => events.hover(this.patchAt(...position(event))));
    this.canvas.addEventListener("pointerleave", () => events.hover(null));
    this.canvas.addEventListener("click", (event) => events.choose(this.patchAt(...position(event))));
  }

  // image: its channels, its side and that of a patch in pixels; text: the pixels from 0 to 1, one channel after the other
  set(image, text) {
    this.root.hidden = !image;
    if (!image) return;
    this.image = image;
    this.across = image.side / image.patch;
    this.bitmap = painted(image, text.split(/\s+/).filter(Boolean).map(Number));
    this.show(null);
  }

  get isShown() { return !this.root.hidden; }

  // weights of a query by patch, the patches of the query and the key, or null; a class token is no patch, so it has -1
  show(chosen) {
    this.chosen = chosen;
    const width = Math.min(MAX_WIDTH, this.root.clientWidth || MAX_WIDTH);
    if (this.surface.width !== width) this.surface.resize(width, width);
    const text = chosen
      ? `Orange: the query, ${chosen.names[0]}. Blue: its weights, relative to the largest, ${number(chosen.largest)}; outlined: the key, ${chosen.names[1]}.`
      : "Choose a cell of the matrix, or a patch as the query.";
    this.caption.textContent = text;
    this.canvas.setAttribute("aria-label", `Picture of ${this.across} × ${this.across} patches. ${text}`);
    this.surface.redraw();
  }

  patchAt(x, y) {
    const step = this.surface.width / this.across;
    const [column, row] = [Math.floor(x / step), Math.floor(y / step)];
    return Math.min(row, column) >= 0 && Math.max(row, column) < this.across ? row * this.across + column : null;
  }

  draw(context) {
    const { width } = this.surface;
    const [step, colors] = [width / this.across, theme()];
    context.imageSmoothingEnabled = false;
    context.drawImage(this.bitmap, 0, 0, width, width);
    const box = (patch) => [(patch % this.across) * step, Math.floor(patch / this.across) * step, step, step];
    if (this.chosen) {
      context.fillStyle = colors.accent;
      this.chosen.weights.forEach((weight, patch) => {
        context.globalAlpha = this.chosen.largest ? (0.7 * Math.abs(weight)) / this.chosen.largest : 0;
        context.fillRect(...box(patch));
      });
    }
    context.globalAlpha = 0.35;
    context.strokeStyle = colors.soft;
    context.lineWidth = 1;
    for (let patch = 0; patch < this.across ** 2; patch++) context.strokeRect(...box(patch));
    context.globalAlpha = 1;
    for (const [patch, color] of this.chosen ? [[this.chosen.key, colors.accent], [this.chosen.query, colors.warm]] : []) {
      if (patch >= 0) frame(context, ...box(patch), colors.paper, color);
    }
  }
}

// paper inside a color, so that it is seen on any picture
function frame(context, x, y, width, height, ...colors) {
  context.lineWidth = 3;
  colors.forEach((color, i) => {
    context.strokeStyle = color;
    const inset = 1.5 + 2 * (colors.length - 1 - i);
    context.strokeRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
  });
}

// three channels are red, green and blue; otherwise their mean is a gray
function painted({ channels, side }, values) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [side, side];
  const [pixels, size] = [new ImageData(side, side), side * side];
  for (let i = 0; i < size; i++) {
    const all = Array.from({ length: channels }, (_, channel) => values[channel * size + i]);
    const mean = all.reduce((sum, value) => sum + value, 0) / channels;
    for (let k = 0; k < 3; k++) pixels.data[4 * i + k] = 255 * (channels === 3 ? all[k] : mean); // clamped to 0 to 255
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}
