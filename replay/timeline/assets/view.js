// Draws a window of the timeline on a canvas, and says what lies under a point. Keeps no state of the page.
"use strict";

const LEFT = 104, RIGHT = 16, STRIP = 30, STEPS_H = 18, AXIS = 26, LEVEL_GAP = 24;
const SHORT = { leaving: 2, returning: 2, out: 2 };

class View {
  constructor(model) { this.model = model; }

  /** Heights for a canvas of this size: rows as tall as there is room, levels below them. */
  layout(width, height) {
    const count = Math.max(1, this.model.order.length);
    const free = height - STRIP - STEPS_H - AXIS - 2 * LEVEL_GAP;
    const pitch = Math.max(5, Math.min(34, Math.floor((free * 0.64) / count)));
    const rowsTop = STRIP + STEPS_H, rowsEnd = rowsTop + pitch * count;
    const rest = Math.max(80, height - AXIS - rowsEnd - 2 * LEVEL_GAP);
    const levelTop = rowsEnd + LEVEL_GAP, levelEnd = levelTop + rest * 0.58;
    const readyTop = levelEnd + LEVEL_GAP;
    this.at = { width, height, pitch, rowsTop, rowsEnd, levelTop, levelEnd, readyTop, bottom: readyTop + rest * 0.42 };
    return this.at;
  }

  x(t) { return LEFT + ((t - this.window.from) / (this.window.to - this.window.from)) * (this.at.width - LEFT - RIGHT); }
  time(x) { return this.window.from + ((x - LEFT) / (this.at.width - LEFT - RIGHT)) * (this.window.to - this.window.from); }

  /** `cursor`: time; `found`: rows of events to mark, `slots`: where an execution was; `hover`: index of a cell whose row is pointed at, or -1. */
  draw(ctx, { window, colours, cursor, found = [], slots = [], hover = -1 }) {
    this.window = window; this.colours = colours; this.ctx = ctx;
    ctx.font = "12px system-ui, Helvetica, Arial, sans-serif";
    ctx.lineWidth = 1; ctx.globalAlpha = 1; ctx.setLineDash([]);
    this.fill("ground", 0, 0, this.at.width, this.at.height);
    this._axis();
    ctx.save();
    ctx.beginPath(); ctx.rect(LEFT, STRIP, this.at.width - LEFT - RIGHT + 9, this.at.height - STRIP); ctx.clip();
    this.model.order.forEach((cell, row) => this._row(cell, this.at.rowsTop + row * this.at.pitch));
    this._levels();
    this._marks();
    this._found(found, slots);
    ctx.restore();
    this._names(hover);
    this._scales();
    this._strip();
    this._cursor(cursor);
  }

  fill(colour, x, y, width, height) { this.ctx.fillStyle = this.colours[colour] || colour; this.ctx.fillRect(x, y, width, height); }

  text(text, x, y, { colour = "ink", align = "left", size = 12, bold = false } = {}) {
    this.ctx.font = `${bold ? "600 " : ""}${size}px system-ui, Helvetica, Arial, sans-serif`;
    this.ctx.textAlign = align; this.ctx.fillStyle = this.colours[colour]; this.ctx.fillText(text, x, y);
  }

  line(colour, points, { width = 1, dash = [] } = {}) {
    const c = this.ctx;
    c.strokeStyle = this.colours[colour]; c.lineWidth = width; c.setLineDash(dash); c.beginPath();
    points.forEach(([x, y], i) => (i ? c.lineTo(x, y) : c.moveTo(x, y)));
    c.stroke(); c.setLineDash([]);
  }

  _axis() {
    const { width, rowsTop, bottom } = this.at, room = (width - LEFT - RIGHT) / 84;
    for (const [t, text] of ticks(this.window.from, this.window.to, room)) {
      const x = Math.round(this.x(t)) + 0.5;
      if (x < LEFT || x > width - RIGHT) continue;
      this.line("grid", [[x, rowsTop], [x, bottom]]);
      this.line("faint", [[x, bottom], [x, bottom + 5]]);
      this.text(text, x, bottom + 18, { align: "center" });
    }
    this.line("faint", [[LEFT, bottom + 0.5], [width - RIGHT, bottom + 0.5]]);
  }

  /** Calls each(x, xEnd, value, i) for the spans of a series that the window shows. */
  spans(rows, each) {
    const { from, to } = this.window;
    for (let i = Math.max(0, lastUpTo(rows.t, from)); i < rows.t.length && rows.t[i] <= to; i++) {
      const end = i + 1 < rows.t.length ? rows.t[i + 1] : this.model.head.end;
      if (end >= from) each(Math.max(this.x(rows.t[i]), LEFT - 2), Math.min(this.x(end), this.at.width - RIGHT + 2), rows.value[i], i);
    }
  }

  _row(cell, y) {
    const height = this.at.pitch - (this.at.pitch > 14 ? 4 : this.at.pitch > 7 ? 2 : 1), late = [];
    this.spans(this.model.of("role", cell), (x, end, value) => {
      const role = this.model.head.roles[value];
      // A change of role takes seconds in a picture of hours: it is drawn wide enough to be seen, above the rest.
      if (SHORT[role]) late.push([role, x, Math.max(end - x, SHORT[role])]);
      else this.fill(role === "training" ? "idle" : role, x, y, Math.max(end - x, 0.3), height);
    });
    this._work(cell, y, height);
    for (const [role, x, width] of late) this.fill(role, x, y, width, height);
  }

  /** Micro-steps; those that can't be seen apart are one bar. */
  _work(cell, y, height) {
    let tone = "", left = 0, right = -1;
    const flush = () => { if (tone) this.fill(tone, left, y, Math.max(right - left, 0.6), height); tone = ""; };
    this.spans(this.model.of("micro_step", cell), (x, end, value) => {
      if (value < 0) return;
      const next = Number(this.model.names[value].slice(2).split(".")[0]) % 2 ? "training" : "training-next", wide = end - x > 4;
      if (tone && (tone !== next || x - right > 0.5 || wide)) flush();
      if (!tone) { tone = next; left = x; }
      right = wide ? end - 1 : end;
      if (wide) flush();
      if (end - x > 84 && height > 12) this.text(this.model.names[value], x + 5, y + height / 2 + 4, { colour: "ground", size: 11 });
    });
    flush();
  }

  _levels() {
    const { levelTop, levelEnd, readyTop, bottom } = this.at, m = this.model;
    this.tops = { w: this._most(["w", "C_R"]), ready: this._most(["ready", "supply"], m.head.rules.rho_min * m.head.rules.B) };
    this._grid(levelTop, levelEnd, this.tops.w);
    this._stairs("capacity", m.of("C_R"), levelTop, levelEnd, this.tops.w, { width: 1.8, dash: [7, 2] });
    this._stairs("level", m.of("w"), levelTop, levelEnd, this.tops.w, { width: 2 });
    this._grid(readyTop, bottom, this.tops.ready);
    this._stairs("supply", m.of("supply"), readyTop, bottom, this.tops.ready, { filled: true });
    this._stairs("ready", m.of("ready"), readyTop, bottom, this.tops.ready, { width: 1.8 });
    const y = this._y(m.head.rules.rho_min * m.head.rules.B, readyTop, bottom, this.tops.ready);
    this.line("bound", [[LEFT, y], [this.at.width - RIGHT, y]], { width: 1.4, dash: [2, 3] });
  }

  _most(names, least = 1) {
    let most = Math.max(1, least);
    for (const name of names) for (const value of this.model.of(name).value) if (value > most) most = value;
    return most * 1.04;
  }

  _y(value, top, bottom, most) { return bottom - (value / most) * (bottom - top); }

  _grid(top, bottom, most) {
    const step = Math.max(1, nice(most / 5));
    for (let value = 0; value <= most; value += step) {
      const y = Math.round(this._y(value, top, bottom, most)) + 0.5;
      this.line("grid", [[LEFT, y], [this.at.width - RIGHT, y]]);
    }
  }

  /** Of every pixel the extremes and the last value. */
  _stairs(colour, rows, top, bottom, most, { filled = false, ...stroke }) {
    const points = [];
    let slot = null, low = 0, high = 0, last = 0;
    const flush = () => { if (slot === null) return; for (const v of [low, high, last]) points.push([slot, this._y(v, top, bottom, most)]); };
    this.spans(rows, (x, end, value) => {
      const at = Math.round(x);
      if (at !== slot) { flush(); if (slot !== null) points.push([at, this._y(last, top, bottom, most)]); slot = at; low = high = value; }
      low = Math.min(low, value); high = Math.max(high, value); last = value;
    });
    flush();
    if (!points.length) return;
    points.push([Math.min(this.x(this.model.head.end), this.at.width - RIGHT), this._y(last, top, bottom, most)]);
    if (!filled) { this.line(colour, points, stroke); return; }
    const c = this.ctx;
    c.fillStyle = this.colours[colour]; c.beginPath(); c.moveTo(points[0][0], bottom);
    for (const [x, y] of points) c.lineTo(x, y);
    c.lineTo(points[points.length - 1][0], bottom); c.fill();
  }

  _marks() {
    const { rowsTop, rowsEnd, levelTop, levelEnd, readyTop, bottom } = this.at, parts = [[rowsTop - 4, rowsEnd], [levelTop, levelEnd], [readyTop, bottom]];
    let taken = -99;
    this._each("step", (x, value) => {
      for (const [from, to] of parts) this.line("step", [[x, from], [x, to]], { dash: [3, 3] });
      if (x - taken > 18) { this.text(String(value), x, rowsTop - 6, { align: "center", size: 11, colour: "faint" }); taken = x; }
    });
    this._each("published", (x) => { for (const [from, to] of parts) this.line("publication", [[x, from], [x, to]], { width: 1.8 }); });
  }

  _each(name, each) {
    const rows = this.model.of(name), { from, to } = this.window;
    for (let i = lastUpTo(rows.t, from - 1) + 1; i < rows.t.length && rows.t[i] <= to; i++)
      if (name === "step" || rows.value[i] > 0 || rows.t[i] > 0) each(Math.round(this.x(rows.t[i])) + 0.5, rows.value[i], rows.seq[i]);
  }

  /** What was searched for: a tick in its cell's row, or over all rows where it has none; an execution's slots are bars. */
  _found(found, slots) {
    const e = this.model.events, { rowsTop, rowsEnd, pitch } = this.at, places = new Map(this.model.order.map((cell, row) => [cell, row]));
    let last = "";
    for (const { cell, from, to } of slots) this.fill("found", this.x(from), rowsTop + places.get(cell) * pitch + pitch * 0.3, Math.max(1, this.x(to) - this.x(from)), Math.max(2, pitch * 0.25));
    const shown = found.filter((row) => e.t[row] >= this.window.from && e.t[row] <= this.window.to);
    // Few are ticks as tall as the row; many are a hem below it, through which the row is still seen.
    const tall = shown.length > 300 ? Math.max(2, pitch * 0.16) : pitch - 1, low = pitch - 1 - tall;
    for (const row of shown) {
      const x = Math.round(this.x(e.t[row])), place = places.get(e.cell[row]), key = `${x}/${place}`;
      if (key === last) continue;
      last = key;
      if (place === undefined) this.fill("found", x - 0.5, rowsTop - 4, 1.5, rowsEnd - rowsTop + 4);
      else this.fill("found", x - 1.5, rowsTop + place * pitch + low, 3, tall);
    }
  }

  _names(hover) {
    const { rowsTop, pitch } = this.at, each = pitch >= 12 ? 1 : Math.ceil(12 / pitch);
    this.model.order.forEach((cell, row) => {
      const { name, index, pool } = this.model.cells[cell];
      if (row % each && cell !== hover) return;
      if (hover >= 0 && cell !== hover && each > 1 && Math.abs(this.model.order.indexOf(hover) - row) < each) return;
      this.text(index === 0 && !pool ? `${name} (core)` : name, LEFT - 7, rowsTop + row * pitch + pitch / 2 + 3,
        { align: "right", size: pitch >= 16 ? 12 : 10, bold: cell === hover });
    });
  }

  _scales() {
    const { levelTop, levelEnd, readyTop, bottom } = this.at;
    for (const [title, top, end, most] of [["executions", levelTop, levelEnd, this.tops.w], ["groups", readyTop, bottom, this.tops.ready]]) {
      this.text(title, LEFT - 7, top - 8, { align: "right", bold: true });
      const step = Math.max(1, nice(most / 5));
      for (let value = 0; value <= most; value += step) this.text(number(value), LEFT - 7, this._y(value, top, end, most) + 4, { align: "right", size: 11, colour: "faint" });
    }
    const bound = number(this.model.head.rules.rho_min * this.model.head.rules.B);
    this._said(levelTop - 8, [["level", "waterlevel w = d - f"], ["capacity", "capacity C_R of the serving cells (dashed)"]]);
    this._said(readyTop - 8, [["ready", "ready and unclaimed; shaded: of them those that the batch still needs"], ["bound", `rho_min B = ${bound} (dotted)`]]);
  }

  /** Words above a level, each in the colour of its line. */
  _said(y, parts) {
    let x = LEFT + 4;
    for (const [colour, text] of parts) { this.text(text, x, y, { colour }); x += 6.2 * text.length + 18; }
  }

  /** The whole run in small, with the window. */
  _strip() {
    const whole = this.window, { width } = this.at, end = Math.max(1, this.model.head.end);
    this.window = { from: 0, to: end };
    const m = this.model, most = this.tops.w;
    this.fill("panel", LEFT, 3, width - LEFT - RIGHT, STRIP - 8);
    this._stairs("rollout", m.of("w"), 4, STRIP - 5, most, { filled: true });
    this._stairs("capacity", m.of("C_R"), 4, STRIP - 5, most, { width: 1 });
    const x = this.x(whole.from), right = this.x(whole.to), c = this.ctx;
    c.globalAlpha = 0.55;
    this.fill("ground", LEFT, 3, x - LEFT, STRIP - 8); this.fill("ground", right, 3, width - RIGHT - right, STRIP - 8);
    c.globalAlpha = 1;
    c.strokeStyle = this.colours.level; c.lineWidth = 1.5; c.strokeRect(x, 3, Math.max(right - x, 2), STRIP - 8);
    this.text("whole run", LEFT - 7, STRIP - 11, { align: "right", size: 11, colour: "faint" });
    this.window = whole;
  }

  _cursor(t) {
    if (t < this.window.from || t > this.window.to) return;
    const x = Math.round(this.x(t)) + 0.5, { rowsTop, bottom } = this.at;
    this.line("ink", [[x, rowsTop - 4], [x, bottom]], { width: 1.4 });
    const c = this.ctx;
    c.fillStyle = this.colours.ink; c.beginPath(); c.moveTo(x - 5, rowsTop - 10); c.lineTo(x + 5, rowsTop - 10); c.lineTo(x, rowsTop - 3); c.fill();
  }

  /** What lies under a point: {strip}, {cell}, {level}, {mark, seq}, or null. */
  hit(x, y) {
    const { rowsTop, rowsEnd, pitch, levelTop, levelEnd, readyTop, bottom, width } = this.at;
    if (y < STRIP) return { strip: true };
    if (x < LEFT - 100 || x > width - RIGHT || y > bottom + AXIS) return null;
    if (y < rowsTop) {
      let mark = null, near = 6;
      for (const name of ["step", "published"]) this._each(name, (at, _, seq) => { if (Math.abs(at - x) < near) { near = Math.abs(at - x); mark = { mark: name, seq }; } });
      return mark;
    }
    if (y < rowsEnd) return { cell: this.model.order[Math.floor((y - rowsTop) / pitch)] };
    if (y >= levelTop && y <= levelEnd) return { level: "w" };
    if (y >= readyTop && y <= bottom) return { level: "ready" };
    return null;
  }
}
