// Pictures of what is shown, as files.

import { inLight, theme } from "./colors.js";
import { shape, SVG } from "./svg.js";

const MAX_SHAPES = 40_000;
const TITLE = 28; // pixels above a PNG

export function toSvg(view, title) {
  const { source } = view;
  const isLarge = source.rows * source.columns > MAX_SHAPES;
  const { shapes, width, height } = isLarge || !source.whole ? pictured(view) : view.toSvg(shape);
  const font = { "font-family": "system-ui, sans-serif", "font-size": "12", fill: theme().ink };
  const root = shape("svg", { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height, ...font });
  root.append(shape("title", {}, title), shape("rect", { width, height, fill: theme().paper }), ...shapes);
  return new XMLSerializer().serializeToString(root);
}

// too many cells for shapes of their own
function pictured(view) {
  const { width, height } = view.surface;
  return { shapes: [shape("image", { href: view.canvas.toDataURL(), width, height })], width, height };
}

export function saveSvg(view, title, name) {
  save(new Blob([toSvg(view, title)], { type: "image/svg+xml" }), `${name}.svg`);
}

// twice as sharp as a plain screen, light on every screen, with the title above
export function savePng(view, title, name) {
  const { width, height } = view.surface;
  const [picture, page] = [sharpCanvas(width, height), sharpCanvas(width, height + TITLE)];
  inLight(() => {
    view.source.images.clear(); // painted in the colors of the screen
    view.draw(picture);
    page.fillStyle = theme().paper;
    page.fillRect(0, 0, width, height + TITLE);
    page.fillStyle = theme().ink;
    page.font = "600 14px system-ui, sans-serif";
    page.textBaseline = "middle";
    page.fillText(title, 8, TITLE / 2, width - 16);
    page.drawImage(picture.canvas, 0, TITLE, width, height);
  });
  view.source.images.clear();
  view.surface.redraw();
  page.canvas.toBlob((blob) => save(blob, `${name}.png`));
}

function sharpCanvas(width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  return context;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
