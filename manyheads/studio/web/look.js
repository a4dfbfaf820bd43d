// The tab Look: three linked levels, the grid of all heads, one head, one cell. Each has a file of its own.

import { getJson, isOffline } from "./api.js";
import { element, status } from "./dom.js";
import { Latest } from "./latest.js";
import { attentionNamed, Compare } from "./look_compare.js";
import { HeadPanel } from "./look_head.js";
import { HeadsPanel } from "./look_heads.js";
import { InputPanel } from "./look_input.js";
import { helpDialog, onKey } from "./look_keys.js";
import { NextPanel } from "./look_next.js";
import { Runs } from "./look_runs.js";
import { command, parsed, requestOf } from "./look_state.js";
import { onChange, read, write } from "./state.js";
import { headsTable, matrixTable } from "./table.js";

export const title = "Look";

export async function show(root) {
  const look = new Look(root, await getJson("look/info"));
  await look.start();
  return () => look.remove();
}

class Look {
  constructor(root, info) {
    Object.assign(this, { root, info, runs: new Runs(), run: null, latest: new Latest() });
    this.input = new InputPanel(this);
    this.compare = new Compare(this);
    this.heads = new HeadsPanel(this);
    this.headPanel = new HeadPanel(this);
    this.next = new NextPanel(this);
    this.tables = element("section", { class: "tables", hidden: true, "aria-label": "Tables" });
    this.help = helpDialog();
    this.page = element("div", { class: "look" }, this.input.root, this.compare.root, this.heads.trust.root,
      element("div", { class: "levels" }, this.heads.root, this.headPanel.root,
        element("aside", {}, this.headPanel.picture.root, element("h2", {}, "Cell"), this.headPanel.cell, this.next.root)),
      this.tables, this.help);
    if (isOffline) root.append(element("p", { class: "soft note" }, info.left_out));
    root.append(this.page);
  }

  async start() {
    const stop = new AbortController();
    const observer = new ResizeObserver(() => this.layout());
    const removal = onChange(() => this.refresh());
    addEventListener("keydown", (event) => onKey(event, this), { signal: stop.signal });
    observer.observe(this.headPanel.views);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(() => this.repaint()), { signal: stop.signal });
    this.remove = () => {
      this.heads.stop();
      this.latest.drop();
      removal();
      stop.abort();
      observer.disconnect();
    };
    const [first] = this.info.checkpoints;
    document.getElementById("checkpoint").textContent = `${first.path} · ${first.architecture} · ${first.parameters.toLocaleString("en")} parameters`;
    if (read().text === undefined) write({ text: this.info.text || first.examples[0] });
    await this.refresh();
  }

  get state() { return parsed(this.info, this.run); }
  get attention() { return attentionNamed(this.run, this.state.attention); }
  get head() { return Math.min(this.state.head, this.attention.heads - 1); }
  get shownHead() { return this.state.mode === "head" ? String(this.head) : this.state.mode; }
  get isPair() { return this.info.checkpoints[this.state.checkpoint].has_source; }

  async refresh() {
    const isCurrent = this.latest.begin();
    this.input.show(this.state);
    try {
      const run = await this.runs.load(requestOf(this.state, this.info));
      if (!isCurrent()) return;
      const isNew = this.run !== run;
      this.run = run;
      const s = this.state;
      status(s.problem);
      this.headPanel.showControls(s);
      this.tables.hidden = !s.tables;
      if (isNew) {
        this.headPanel.clearCursor();
        this.input.showRun(run);
        this.heads.showRun(run, s);
      }
      this.heads.show(s);
      await Promise.all([this.headPanel.show(s, isCurrent), this.next.show(s, isCurrent), this.heads.showDifferences(s, isCurrent)]);
      this.retried = false;
    } catch (error) {
      if (isCurrent()) this.fail(error);
    }
  }

  // a run that the server no longer holds is computed again, once
  fail(error) {
    status(error.message);
    if (error.code !== "usage.expired") return;
    this.runs.clear();
    if (this.retried) return;
    this.retried = true;
    this.refresh();
  }

  layout() {
    this.heads.fit();
    this.headPanel.layout();
  }

  repaint() {
    this.runs.sources.clear();
    this.headPanel.repaint();
    this.heads.showRun(this.run, this.state);
  }

  chooseHead(name, head, open) {
    write({ attention: name, head: String(head), mode: null, row: null, column: null });
    if (open) this.headPanel.current.canvas.focus();
  }

  showTables() {
    if (!this.state.tables || !this.headPanel.a) return;
    const { source, rows, columns } = this.headPanel.a;
    this.tables.replaceChildren(matrixTable(this.headPanel.title.textContent, source, rows, columns), headsTable(this.heads.grid));
  }

  async copy() {
    const text = command(this.info);
    try {
      await navigator.clipboard.writeText(text);
      status(`copied: ${text}`);
    } catch {
      status(text); // without permission to copy it is shown
    }
  }
}
