// The page's controls: window, cursor, search, keys, mouse. Drawing and asking are the others' part.
"use strict";

class Page {
  constructor(model, meaning) {
    this.model = model;
    this.view = new View(model);
    this.canvas = document.getElementById("chart");
    this.tip = document.getElementById("tip");
    this.search = document.getElementById("search");
    this.window = { from: 0, to: Math.max(1, model.head.end) };
    this.row = model.events.seq.length - 1;
    this.pointed = this.found = null;
    this.hover = -1;
    this.panel = new Panel(document.getElementById("panel"), model, { go: (seq) => this.goTo(seq), search: (text) => this.look(text) });
    document.getElementById("title").textContent = model.head.title;
    this._legend(meaning);
    this._ground(matchMedia("(prefers-color-scheme: dark)").matches);
    this._listen();
    this._fromAddress();
    this.refresh();
  }

  /** For a live page: rows that came since. Whoever looks at the end goes on looking at the end. */
  append(part) {
    const atEnd = this.window.to >= this.model.head.end, last = this.row === this.model.events.seq.length - 1;
    this.model.append(part);
    if (atEnd) this.window = { ...this.window, to: Math.max(1, this.model.head.end) };
    if (last) this.row = this.model.events.seq.length - 1;
    this.refresh();
  }

  refresh() {
    this.panel.show(this.row, { pointed: this.pointed, found: this.found });
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      const { clientWidth: width, clientHeight: height } = this.canvas, ratio = devicePixelRatio || 1;
      this.canvas.width = width * ratio; this.canvas.height = height * ratio;
      const ctx = this.canvas.getContext("2d");
      ctx.scale(ratio, ratio);
      this.view.layout(width, height);
      this.view.draw(ctx, { window: this.window, colours: this.colours, cursor: this.model.events.t[this.row], found: this.found ? this.found.rows : [], slots: this.found ? this.found.slots : [], hover: this.hover });
    });
  }

  goTo(seq) { this.go(this.model.rowAt(seq)); }

  go(row) {
    this.row = row;
    const t = this.model.events.t[row], { from, to } = this.window;
    if (t < from || t > to) this.move(t - (to - from) / 2);
    history.replaceState(null, "", `#seq=${this.model.events.seq[row]}`);
    this.refresh();
  }

  move(from) {
    const width = this.window.to - this.window.from, end = Math.max(1, this.model.head.end);
    const start = Math.max(0, Math.min(from, end - width));
    this.window = { from: start, to: start + width };
    this.draw();
  }

  zoom(factor, around) {
    const { from, to } = this.window, end = Math.max(1, this.model.head.end), width = Math.max(Math.min((to - from) * factor, end), Math.min(50, end));
    this.window = { from, to: from + width };
    this.move(around - ((around - from) / (to - from)) * width);
  }

  look(text) {
    const found = this.model.find(text), names = document.getElementById("found");
    names.replaceChildren(...(found.near || []).map((name) => element("option", { value: name })));
    if (found.seq !== undefined) { this.found = null; this.search.setAttribute("aria-invalid", "false"); this.goTo(found.seq); return; }
    this.found = found.rows && found.rows.length ? { ...found, slots: found.entity.startsWith("e-") ? this.model.slotsOf(found.rows) : [] } : null;
    this.search.setAttribute("aria-invalid", String(!this.found));
    if (this.found) { this.search.value = found.entity; this.go(found.rows[0]); } else this.refresh();
  }

  forget() { this.search.setAttribute("aria-invalid", "false"); this.found = this.pointed = null; this.search.value = ""; this.refresh(); }

  step(direction, only) { this.go(this.model.step(this.row, direction, only, this.found ? this.found.rows : null)); }

  _fromAddress() {
    const found = /[#&]seq=(\d+)/.exec(location.hash);
    if (found) this.row = this.model.rowAt(Number(found[1]));
    const entity = /[#&]find=([^&]+)/.exec(location.hash);
    if (entity) this.look(decodeURIComponent(entity[1]));
  }

  _ground(dark) {
    document.documentElement.dataset.ground = dark ? "dark" : "light";
    const style = getComputedStyle(document.documentElement);
    this.colours = {};
    for (const name of ["ground", "panel", "ink", "faint", "grid", "rollout", "training", "training-next", "idle", "leaving", "returning", "out", "away",
      "level", "capacity", "ready", "supply", "bound", "step", "publication", "found"]) this.colours[name] = style.getPropertyValue(`--${name}`).trim();
  }

  _legend(meaning) {
    const seen = new Set(), model = this.model;
    for (const cell of model.order) for (const value of model.of("role", cell).value) seen.add(model.head.roles[value]);
    const parts = Object.entries(meaning).filter(([name]) => seen.has(name) || (name === "idle" && seen.has("training"))).map(([name, text]) =>
      element("span", {}, element("i", { style: `background: var(--${name})` }), name === "training" ? element("i", { style: "background: var(--training-next)" }) : "", text));
    const dashed = (name, text) => element("span", {}, element("i", { class: "mark", style: `border-left: 2px dashed var(--${name})` }), text);
    parts.push(dashed("step", "step made"), element("span", {}, element("i", { class: "mark", style: "border-color: var(--publication)" }), "weights published"));
    document.getElementById("legend").replaceChildren(...parts);
    const left = Object.entries(model.leftOut);
    if (left.length || model.head.resolution) {
      const count = left.reduce((sum, [, each]) => sum + each, 0), parts = [];
      if (count) parts.push(`${count} events are not listed here, only in the log: ${left.map(([kind]) => kind).join(", ")}.`);
      if (model.head.resolution) parts.push(`Counts are exact to ${duration(model.head.resolution)}.`);
      document.getElementById("legend").after(element("div", { class: "notice" }, parts.join(" ")));
    }
  }

  _listen() {
    const on = (id, run) => document.getElementById(id).addEventListener("click", run);
    const middle = () => { const t = this.model.events.t[this.row], { from, to } = this.window; return t >= from && t <= to ? t : (from + to) / 2; };
    on("in", () => this.zoom(0.5, middle()));
    on("out", () => this.zoom(2, middle()));
    on("whole", () => this.zoom(Infinity, 0));
    on("ground", () => { this._ground(document.documentElement.dataset.ground !== "dark"); this.draw(); });
    on("help", () => document.getElementById("keys").showModal());
    this.search.addEventListener("input", () => {
      const near = this.model.find(this.search.value).near || [];
      document.getElementById("found").replaceChildren(...near.map((name) => element("option", { value: name })));
    });
    this.search.addEventListener("change", () => {
      if (!this.search.value) { this.forget(); return; }
      this.look(this.search.value);
      // Arrows then step; in the box they would move the caret.
      if (this.search.getAttribute("aria-invalid") !== "true") this.canvas.focus();
    });
    addEventListener("resize", () => this.draw());
    addEventListener("hashchange", () => { this._fromAddress(); this.refresh(); });
    addEventListener("keydown", (event) => this._key(event, middle));
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(this.window.from + ((event.deltaX || event.deltaY) / 800) * (this.window.to - this.window.from));
      else this.zoom(Math.exp(event.deltaY / 400), this.view.time(event.offsetX));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this._drag(event));
    this.canvas.addEventListener("pointermove", (event) => this._point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; if (this.hover >= 0) { this.hover = -1; this.draw(); } });
  }

  _key(event, middle) {
    if (event.target === this.search) { if (event.key === "Escape") { this.forget(); this.canvas.focus(); } return; }
    if (event.ctrlKey || event.metaKey || document.getElementById("keys").open) return;
    const only = event.shiftKey ? "decision" : event.altKey ? "transition" : "";
    const run = {
      ArrowLeft: () => this.step(-1, only), ArrowRight: () => this.step(1, only), Home: () => this.go(0), End: () => this.go(this.model.events.seq.length - 1),
      "+": () => this.zoom(0.5, middle()), "=": () => this.zoom(0.5, middle()), "-": () => this.zoom(2, middle()), 0: () => this.zoom(Infinity, 0),
      "/": () => this.search.focus(), Escape: () => this.forget(), "?": () => document.getElementById("keys").showModal(),
      d: () => document.getElementById("ground").click(),
    }[event.key];
    if (run) { event.preventDefault(); run(); }
  }

  /** A press that moves drags the window; one that does not points at something. */
  _drag(event) {
    const start = event.offsetX, from = this.window.from, strip = event.offsetY < STRIP, { width } = this.view.at;
    const toTime = (x) => ((x - LEFT) / (width - LEFT - RIGHT)) * this.model.head.end, half = (this.window.to - this.window.from) / 2;
    let moved = false;
    if (strip) this.move(toTime(start) - half);
    const move = (each) => {
      moved = moved || Math.abs(each.offsetX - start) > 3;
      if (strip) this.move(toTime(each.offsetX) - half);
      else if (moved) this.move(from - ((each.offsetX - start) / (width - LEFT - RIGHT)) * (this.window.to - this.window.from));
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", (each) => {
      this.canvas.removeEventListener("pointermove", move);
      if (!moved && !strip) this._pick(each.offsetX, each.offsetY);
    }, { once: true });
  }

  _pick(x, y) {
    const what = this.view.hit(x, y);
    if (!what || what.strip) return;
    this.pointed = this.model.behind(what, this.view.time(x - 3), this.view.time(x + 3));
    this.go(what.mark ? this.model.rowAt(what.seq) : this.model.rowAtTime(this.view.time(x)));
  }

  _point(event) {
    if (!this.view.at) return;
    const what = this.view.hit(event.offsetX, event.offsetY), hover = what && what.cell !== undefined ? what.cell : -1;
    if (hover !== this.hover) { this.hover = hover; this.draw(); }
    this.tip.hidden = !what || what.strip || event.buttons > 0 || (event.offsetX < LEFT && !what.mark);
    if (this.tip.hidden) return;
    this.tip.textContent = this._tell(what, this.view.time(event.offsetX));
    const left = event.offsetX + 16 + this.tip.offsetWidth > this.canvas.clientWidth ? event.offsetX - 16 - this.tip.offsetWidth : event.offsetX + 16;
    this.tip.style.left = `${left}px`; this.tip.style.top = `${this.canvas.offsetTop + event.offsetY + 14}px`;
  }

  _tell(what, t) {
    const model = this.model, seq = what.mark ? what.seq : model.events.seq[model.rowAtTime(t)], when = duration(t);
    if (what.mark) { const event = model.event(model.rowAt(seq)); return `${event.kind} ${event.entity}\n${event.note}`; }
    if (what.level === "w") return `${when}: w = ${model.value("w", seq)}, C_R = ${model.value("C_R", seq)}`;
    if (what.level === "ready") return `${when}: ${model.value("ready", seq)} groups ready, ${model.value("supply", seq)} needed`;
    const role = model.of("role", what.cell), k = lastUpTo(role.seq, seq), name = model.cells[what.cell].name;
    if (k < 0) return `${name}: not there yet`;
    const work = model.value("micro_step", seq, what.cell, -1), state = model.head.roles[role.value[k]];
    const doing = state === "training" ? (work < 0 ? ", waits for a micro-step" : `, ${model.names[work]}`) : `, ${model.value("load", seq, what.cell)} executions`;
    return `${name} at ${when}: ${state} for ${duration(t - role.t[k])}${doing}`;
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return undoDifferences(JSON.parse(await new Response(stream).text()));
}

if (typeof document !== "undefined" && document.getElementById("data")) {
  unpacked(document.getElementById("data").textContent).then((found) => {
    globalThis.timeline = new Page(new Model(found), JSON.parse(document.getElementById("meaning").textContent));
  });
}
