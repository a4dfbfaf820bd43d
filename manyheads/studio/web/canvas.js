// Canvases of this page: sharp on every screen, and drawn once per frame.

export class Surface {
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.draw = draw;
    this.pending = 0;
  }

  resize(width, height) {
    const ratio = devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
    }
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.redraw();
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw(this.context);
    });
  }
}

export function position(event) {
  const box = event.currentTarget.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

// a token as one short line: spaces and line breaks are visible
export function label(token, length = 14) {
  const text = token.replace(/ /g, "\u2423").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^\u2423(?=.)/, "");
  return text.length > length ? `${text.slice(0, length - 1)}…` : text || "∅";
}

export function number(value) {
  if (value === undefined || value === null) return "…";
  if (value === 0) return "0";
  return Math.abs(value) >= 0.0001 && Math.abs(value) < 1e4 ? value.toFixed(4) : value.toExponential(2);
}
