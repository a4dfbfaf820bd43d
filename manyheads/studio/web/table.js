// The same as tables, for screen readers and for copying: the strongest keys of each query, and the heads.

import { number } from "./canvas.js";
import { element, table } from "./dom.js";

const [ROWS, KEYS] = [400, 3];

export function matrixTable(title, source, rows, columns) {
  if (!source.whole) return element("p", { class: "soft" }, "The matrix is too large for a table; move through it with the arrow keys.");
  const lines = rows.slice(0, ROWS).map((row, r) => {
    const values = source.row(r);
    const top = [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, KEYS);
    return [row.label, ...top.map((c) => `${columns[c].label}: ${number(values[c])}`)];
  });
  const note = rows.length > ROWS ? `, first ${ROWS} of ${rows.length} queries` : "";
  return table(`${title}: the keys with the largest weights${note}`, ["query", "first", "second", "third"].slice(0, 1 + Math.min(KEYS, columns.length)), lines);
}

export function headsTable(grid) {
  const lines = grid.heads().map(({ info, head }) => {
    const value = grid.value(info, head);
    const patterns = (value.badges ?? []).map((name) => grid.patterns[name].meaning).join(", ");
    const moved = grid.showsDifferences ? [number(value.moved)] : [];
    return [`${info.name}, head ${head}`, number(value.entropy), number(value.distance), patterns, number(value.mean), ...moved];
  });
  const titles = ["head", "entropy (nats)", "distance (tokens)", "pattern", "effect"];
  return table("Heads", grid.showsDifferences ? [...titles, "weight moved"] : titles, lines);
}
