// Shapes of SVG from plain data. Texts are text nodes.

export const SVG = "http://www.w3.org/2000/svg";

export function shape(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
