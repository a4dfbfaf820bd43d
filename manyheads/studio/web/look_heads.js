// The first level: the grid of all heads. Thumbnails come first, then measures, then the effect of each head.

import { getBytes, getJson, query } from "./api.js";
import { number } from "./canvas.js";
import { element } from "./dom.js";
import { effectUnit, Grid } from "./grid.js";
import { Latest } from "./latest.js";
import { check, select, SORTS } from "./look_controls.js";
import { Trust } from "./look_trust.js";

const NARROW = 1100; // pixels up to which the levels are below each other, as in style.css

export class HeadsPanel {
  constructor(look) {
    this.look = look;
    this.latest = new Latest();
    this.sort = select("sort heads by", SORTS, "sort");
    this.differences = check("differences", "differences");
    this.trust = new Trust();
    this.grids = element("div", { class: "grids" });
    this.grid = new Grid(this.grids, look.info.patterns, { choose: (name, head, open) => look.chooseHead(name, head, open) });
    this.legend = element("p", { class: "soft legend" });
    this.root = element("section", { class: "heads", "aria-label": "All heads" },
      element("div", { class: "bar" }, element("h2", {}, "Heads"), this.sort.root, this.differences.root), this.grids, this.legend);
  }

  stop() { this.latest.drop(); }

  // a third of the page, or all of it
  fit() { this.grid.fit(Math.max(224, this.look.root.clientWidth * (innerWidth <= NARROW ? 1 : 0.35) - 15)); }

  show(s) {
    this.sort.control.value = s.sort;
    if (this.grid.sort !== s.sort) this.grid.order(s.sort);
    this.grid.chosen = { name: this.look.attention.name, head: s.mode === "head" ? this.look.head : null };
    this.grid.off = new Set(s.off.map((pair) => pair.join(":")));
    this.differences.control.checked = Boolean(s.differences);
    this.differences.root.hidden = !this.look.compare.hasRun(s);
    this.grid.showsDifferences = Boolean(s.differences) && this.look.compare.hasRun(s);
    this.showLegend();
    this.grid.redraw();
  }

  // what each head changes in the run that is compared
  async showDifferences(s, isCurrent) {
    if (!this.grid.showsDifferences) return;
    const { run } = this.look;
    const other = await this.look.compare.run(s);
    const key = `${run.run}/${other.run}`;
    if (!isCurrent() || this.compared === key) return;
    this.compared = key;
    this.grid.clearDifferences();
    const shape = ({ heads, rows, columns }) => `${heads}×${rows}×${columns}`;
    const same = run.attentions.filter((info) => other.attentions.some((attention) => attention.name === info.name && shape(attention) === shape(info)));
    this.incomparable = run.attentions.length - same.length;
    for (const info of same) {
      const buffer = await getBytes(query("look/differences", { run: run.run, other: other.run, name: info.name }));
      if (this.compared !== key) return;
      this.grid.setDifferences(info, buffer);
    }
    this.showLegend();
    this.look.showTables();
  }

  async showRun(run, s) {
    const isCurrent = this.latest.begin();
    this.grid.sort = s.sort;
    this.compared = null;
    this.grid.set(run);
    this.fit();
    this.trust.start(run, this.look.info.checkpoints[run.checkpoint]);
    this.showLegend();
    performance.mark("look-run");
    try {
      await this.loadThumbnails(isCurrent, run);
      performance.measure("look-painted", "look-run");
      await this.loadMeasures(isCurrent, run);
      if (isCurrent()) await this.trust.showHash();
      await this.loadEffects(isCurrent, run);
    } catch (error) {
      if (isCurrent()) this.look.fail(error);
    }
  }

  async loadThumbnails(isCurrent, run) {
    await Promise.all(run.attentions.map(async (info) => {
      const bytes = new Uint8Array(await getBytes(query("look/thumbnails", { run: run.run, name: info.name })));
      if (isCurrent()) this.grid.setThumbnails(info, bytes);
    }));
  }

  async loadMeasures(isCurrent, run) {
    for (const info of run.attentions) {
      if (!isCurrent()) return;
      const measured = await getJson(query("look/measures", { run: run.run, name: info.name }));
      if (!isCurrent()) return;
      measured.heads.forEach((measures, head) => this.grid.merge(info, head, measures));
      this.trust.add(measured.trust);
      this.grid.redraw();
      this.showLegend();
    }
    this.settle();
  }

  async loadEffects(isCurrent, run) {
    for (const { info, head } of this.grid.heads()) {
      if (!isCurrent()) return;
      const effect = await getJson(query("look/effect", { run: run.run, name: info.name, head }));
      if (!isCurrent()) return;
      this.grid.merge(info, head, effect);
      this.grid.redraw();
      this.showLegend();
    }
    this.settle();
    this.look.page.dataset.effects = "all";
  }

  settle() {
    if (this.grid.sort !== "layer") this.grid.order(this.grid.sort);
    this.look.showTables();
  }

  showLegend() {
    if (this.grid.showsDifferences) {
      const missing = this.incomparable ? ` ${this.incomparable} attentions have other tokens or heads there, so they are not compared.` : "";
      this.legend.textContent = "Color: √ of the largest change of each pixel, blue for more weight here, orange for more in the run that is compared. "
        + `Bar: the share of a row's weight that moved.${missing}`;
      return;
    }
    const present = new Set(this.grid.heads().flatMap(({ info, head }) => this.grid.value(info, head).badges ?? []));
    const names = [...present].map((name) => this.look.info.patterns[name]).map(({ letter, meaning, threshold }) => `${letter} ${meaning} (mean weight ≥ ${threshold})`);
    this.legend.textContent = `Color: √weight, the largest of each pixel. Orange bar: how much the output changes without the head${this.longest()}. ${names.join(" · ")}`;
  }

  // the scale of the bars, which are relative
  longest() {
    const effects = this.grid.heads().map(({ info, head }) => this.grid.value(info, head)).filter(({ mean }) => mean !== undefined);
    if (!effects.length) return "";
    return ` (√ scale, longest bar: ${number(Math.max(...effects.map(({ mean }) => mean)))} ${effectUnit(effects[0].measure)})`;
  }

  // the panel of the chosen head
  focus() { (this.grid.panels.find((panel) => panel.heads.some((item) => this.grid.isChosen(item))) ?? this.grid.panels[0]).canvas.focus(); }
}
