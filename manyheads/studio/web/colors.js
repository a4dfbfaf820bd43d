// Colors of weights, from the style sheet: none is the paper, 1 the accent. A difference is blue above 0, warm below.

let palette = null;

export function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { ink: get("--ink"), paper: get("--paper"), soft: get("--soft"), line: get("--line"), raised: get("--raised"),
    accent: get("--accent"), warm: get("--warm"), full: rgb(get("--full")), paperRgb: rgb(get("--cell")), warmRgb: rgb(get("--warm-rgb")) };
}

const rgb = (text) => text.split(",").map(Number);

// 256 colors from the paper to a color; the eye sees small weights because the scale is the square root
function ramp(from, middle, to) {
  const colors = new Uint8Array(256 * 3);
  for (let i = 0; i < 256; i++) {
    const t = i / 255;
    for (let k = 0; k < 3; k++) {
      const [a, b, u] = t < 0.5 ? [from[k], middle[k], t * 2] : [middle[k], to[k], t * 2 - 1];
      colors[3 * i + k] = Math.round(a + (b - a) * u);
    }
  }
  return colors;
}

export function colors() {
  if (palette) return palette;
  const { paperRgb, full, warmRgb } = theme();
  const dark = paperRgb[0] < 128;
  const mix = (a, b, t) => a.map((x, k) => x + (b[k] - x) * t);
  const end = dark ? mix(full, [255, 255, 255], 0.75) : mix(full, [10, 10, 40], 0.72);
  const warmEnd = dark ? mix(warmRgb, [255, 255, 255], 0.5) : mix(warmRgb, [60, 10, 0], 0.5);
  palette = { weight: ramp(paperRgb, mix(paperRgb, full, dark ? 0.7 : 0.8), end), warm: ramp(paperRgb, mix(paperRgb, warmRgb, 0.8), warmEnd) };
  return palette;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette = null; });

// draws in the light colors, whatever the screen has
export function inLight(draw) {
  const { classList } = document.documentElement;
  classList.add("light");
  palette = null;
  draw();
  classList.remove("light");
  palette = null;
}

// the color of a weight from 0 to 1, or of a difference from −1 to 1, written to 4 bytes
export function paint(bytes, offset, value) {
  const table = value < 0 ? colors().warm : colors().weight;
  const index = 3 * Math.min(255, Math.round(255 * Math.sqrt(Math.min(1, Math.abs(value)))));
  bytes[offset] = table[index];
  bytes[offset + 1] = table[index + 1];
  bytes[offset + 2] = table[index + 2];
  bytes[offset + 3] = 255;
}

export function css(value) {
  const bytes = [0, 0, 0, 0];
  paint(bytes, 0, value);
  return `rgb(${bytes[0]}, ${bytes[1]}, ${bytes[2]})`;
}

export const isDarkCell = (value) => Math.sqrt(Math.abs(value)) > 0.55;
