// Pictures of what is shown, as files.

import { theme } from "./colors.js";
import { shape, SVG } from "./svg.js";

const MAX_SHAPES = 40_000;

export function toSvg(view, title) {
  const { source } = view;
  const isLarge = source.rows * source.columns > MAX_SHAPES;
  const { shapes, width, height } = isLarge || !source.whole ? pictured(view) : view.toSvg(shape);
  const root = shape("svg", { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, sans-serif", "font-size": "12", fill: theme().ink });
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

export function savePng(view, name) {
  const made = document.createElement("canvas");
  [made.width, made.height] = [view.canvas.width, view.canvas.height];
  const context = made.getContext("2d");
  context.fillStyle = theme().paper;
  context.fillRect(0, 0, made.width, made.height);
  context.drawImage(view.canvas, 0, 0);
  made.toBlob((blob) => save(blob, `${name}.png`));
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
