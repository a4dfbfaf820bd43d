// Where the numbers of a matrix come from: all of them for a small one, tiles on demand for a large one.

import { getBytes, query } from "./api.js";

export const TILE = 256;
const WHOLE = 1 << 20; // cells up to which the whole matrix is held
const MAX_TILES = 96;

const floats = async (path) => new Float32Array(await getBytes(path));

// the matrix of a head, or of the mean, max or rollout, as the server gives it
export async function openSource(run, info, head) {
  const key = { run: run.run, name: info.name, head: String(head) };
  if (info.rows * info.columns > WHOLE) return new TiledSource(key, info);
  const values = new Float32Array(info.rows * info.columns);
  const loads = [];
  for (let row = 0; row * TILE < info.rows; row++) {
    for (let column = 0; column * TILE < info.columns; column++) {
      loads.push(floats(query("look/tile", { ...key, row, column, level: 0 })).then((tile) => {
        const width = Math.min(TILE, info.columns - column * TILE);
        for (let r = 0; r * width < tile.length; r++) {
          values.set(tile.subarray(r * width, (r + 1) * width), (row * TILE + r) * info.columns + column * TILE);
        }
      }));
    }
  }
  await Promise.all(loads);
  return new WholeSource(info.rows, info.columns, values);
}

export class WholeSource {
  constructor(rows, columns, values) {
    Object.assign(this, { rows, columns, values, whole: true, levels: [{ rows, columns, values }] });
    while (this.levels.at(-1).rows > TILE || this.levels.at(-1).columns > TILE) this.levels.push(halved(this.levels.at(-1)));
    this.images = new Map();
  }

  get maxLevel() { return this.levels.length - 1; }

  value(row, column) { return this.values[row * this.columns + column]; }

  row(row) { return this.values.subarray(row * this.columns, (row + 1) * this.columns); }

  tile(level, row, column) {
    const { rows, columns, values } = this.levels[level];
    const [top, left] = [row * TILE, column * TILE];
    const [height, width] = [Math.min(TILE, rows - top), Math.min(TILE, columns - left)];
    const part = new Float32Array(height * width);
    for (let r = 0; r < height; r++) part.set(values.subarray((top + r) * columns + left, (top + r) * columns + left + width), r * width);
    return { height, width, values: part };
  }
}

// each number is the one of 2 × 2 cells with the largest magnitude
function halved({ rows, columns, values }) {
  const [height, width] = [Math.ceil(rows / 2), Math.ceil(columns / 2)];
  const largest = new Float32Array(height * width);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const value = values[r * columns + c];
      const at = (r >> 1) * width + (c >> 1);
      if (Math.abs(value) > Math.abs(largest[at])) largest[at] = value;
    }
  }
  return { rows: height, columns: width, values: largest };
}

class TiledSource {
  constructor(key, { rows, columns }) {
    Object.assign(this, { key, rows, columns, whole: false, images: new Map(), tiles: new Map(), onload: () => {} });
    this.maxLevel = Math.max(0, Math.ceil(Math.log2(Math.max(rows, columns) / TILE)));
  }

  value(row, column) {
    const tile = this.tile(0, Math.floor(row / TILE), Math.floor(column / TILE));
    return tile?.values[(row % TILE) * tile.width + (column % TILE)];
  }

  row() { return null; }

  tile(level, row, column) {
    const id = `${level}/${row}/${column}`;
    const cached = this.tiles.get(id);
    if (cached !== undefined) {
      this.tiles.delete(id); // the most recently used last
      this.tiles.set(id, cached);
      return cached;
    }
    this.tiles.set(id, null); // requested
    floats(query("look/tile", { ...this.key, row, column, level })).then((values) => {
      const width = Math.min(TILE, Math.ceil(this.columns / 2 ** level) - column * TILE);
      this.tiles.set(id, { height: values.length / width, width, values });
      for (const old of this.tiles.keys()) {
        if (this.tiles.size <= MAX_TILES) break;
        this.tiles.delete(old);
        this.images.delete(old);
      }
      this.onload();
    }, () => this.tiles.delete(id));
    return null;
  }
}

// ---------------------------------------------------------------- what is shown of a whole matrix

// Rows and columns as groups of tokens: without special tokens, or by words. Weights on the tokens of a word are added,
// those of its queries averaged (Clark et al. 2019), so that a row still sums to 1.
export function groups(text, count, { hideSpecial, merge }) {
  const tokenGroups = [];
  const shift = count - text.tokens.length; // a class token that the model adds
  for (let i = 0; i < count; i++) {
    const k = i - shift;
    const token = k < 0 ? "[CLS]" : text.tokens[k];
    const special = k < 0 || text.special[k];
    if (hideSpecial && special) continue;
    const last = tokenGroups.at(-1);
    if (merge && last && k >= 0 && last.word === text.words[k]) {
      last.tokens.push(i);
      last.label += token;
    } else {
      tokenGroups.push({ tokens: [i], label: token, special, word: k < 0 ? null : text.words[k], patch: k });
    }
  }
  return tokenGroups;
}

export function transformed(source, rows, columns, mass) {
  const values = new Float32Array(rows.length * columns.length);
  rows.forEach((row, r) => {
    for (const i of row.tokens) {
      const whole = source.row(i);
      columns.forEach((column, c) => {
        for (const j of column.tokens) values[r * columns.length + c] += whole[j] / row.tokens.length;
      });
    }
    if (mass < 1) keepMass(values.subarray(r * columns.length, (r + 1) * columns.length), mass);
  });
  return new WholeSource(rows.length, columns.length, values);
}

// sets to 0 what does not belong to the largest weights that together have this share of the row
export function keepMass(row, mass) {
  const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
  const total = row.reduce((sum, value) => sum + value, 0);
  let sum = 0;
  for (const index of order) {
    if (sum >= mass * total) row[index] = 0;
    else sum += row[index];
  }
}

export function difference(a, b) {
  return new WholeSource(a.rows, a.columns, a.values.map((value, i) => value - b.values[i]));
}
