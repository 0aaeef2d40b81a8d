// What can be asked of a timeline's document (replay/timeline/model.py describes it). No page, no clock, no drawing in here:
// a page of another kind, or one that a live stream feeds with `append`, stands on it as well.
"use strict";

const TABLES = ["events", "changes", "reasons"];
const LISTS = ["names", "checks", "cells", "says", "series"];
const PACKED = { events: ["seq", "t", "cause"], changes: ["seq", "t"], reasons: ["seq"] };

/** Undo what `html.pack` did to the columns: they come as differences. In place. */
function undoDifferences(document) {
  for (const [table, columns] of Object.entries(PACKED)) {
    for (const column of columns) {
      const values = document[table][column];
      for (let i = 1; i < values.length; i++) values[i] += values[i - 1];
    }
  }
  return document;
}

/** Index of the last entry that is not above `value`; -1 when all are. `values` ascend. */
function lastUpTo(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

class Model {
  /** `document` as it is documented: plain columns. */
  constructor(document) {
    this.head = {};
    for (const list of LISTS) this[list] = [];
    this.events = { seq: [], t: [], says: [], entity: [], cell: [], cause: [], note: [] };
    this.reasons = { seq: [], rule: [], left: [], op: [], right: [], holds: [] };
    this.leftOut = {};
    this.rows = [];           // of each series: {seq, t, value}
    this.byName = new Map();  // "name/cell" -> index of the series
    this.index = new Map();   // entity -> index into names
    this.append(document);
  }

  /** Rows and entries that came since: a part as `Tracks.take` gives it. */
  append(part) {
    const { title, run, code, start_us, end, finished, rules, roles, resolution } = part;
    this.head = { title, run, code, start_us, end, finished, rules, roles, resolution,
      first: this.head.first || part.first, last: part.last };
    for (const list of LISTS) {
      const from = this[list].length;
      for (const entry of part[list]) this[list].push(entry);
      if (list === "names") for (let i = from; i < this.names.length; i++) if (this.names[i]) this.index.set(this.names[i], i);
    }
    for (let i = this.rows.length; i < this.series.length; i++) {
      this.rows.push({ seq: [], t: [], value: [] });
      this.byName.set(`${this.series[i].name}/${this.series[i].cell}`, i);
    }
    for (const [kind, count] of Object.entries(part.left_out)) this.leftOut[kind] = (this.leftOut[kind] || 0) + count;
    for (const table of ["events", "reasons"])
      for (const column of Object.keys(this[table]))
        for (const value of part[table][column]) this[table][column].push(value);
    const { seq, t, series, value } = part.changes;
    for (let i = 0; i < seq.length; i++) {
      const row = this.rows[series[i]];
      row.seq.push(seq[i]); row.t.push(t[i]); row.value.push(value[i]);
    }
    this._derive();
  }

  /** w = d - f is no series of its own; who belongs to whom is read off the names. */
  _derive() {
    const d = this.of("d"), f = this.of("f"), w = { seq: [], t: [], value: [] };
    for (let i = 0, j = 0; i < d.seq.length || j < f.seq.length;) {
      const first = j >= f.seq.length || (i < d.seq.length && d.seq[i] <= f.seq[j]);
      const at = first ? d : f, k = first ? i++ : j++;
      w.seq.push(at.seq[k]); w.t.push(at.t[k]);
      w.value.push((i ? d.value[i - 1] : 0) - (j ? f.value[j - 1] : 0));
    }
    this.w = w;
    this._events = null;
    this.order = this.cells.map((_, i) => i).sort((a, b) => this.cells[a].pool - this.cells[b].pool || this.cells[a].index - this.cells[b].index);
  }

  /** Rows of a series; `w` is one too. Empty columns where there is none. */
  of(name, cell = -1) {
    if (name === "w") return this.w;
    return this.rows[this.byName.get(`${name}/${cell}`)] || { seq: [], t: [], value: [] };
  }

  /** Its value after the event at `seq`; `otherwise` before its first row. */
  value(name, seq, cell = -1, otherwise = 0) {
    const row = this.of(name, cell), i = lastUpTo(row.seq, seq);
    return i < 0 ? otherwise : row.value[i];
  }

  /** Row of the last event up to `seq`, or up to time `t`; 0 before the first. */
  rowAt(seq) { return Math.max(0, lastUpTo(this.events.seq, seq)); }
  rowAtTime(t) { return Math.max(0, lastUpTo(this.events.t, t)); }

  /** Whether the event at `seq` is listed. */
  lists(seq) { return this.events.seq[this.rowAt(seq)] === seq; }

  event(row) {
    const e = this.events, says = this.says[e.says[row]];
    return { row, seq: e.seq[row], t: e.t[row], kind: says.kind, owner: says.owner, decision: says.decision,
      entity: this.names[e.entity[row]], cell: e.cell[row] < 0 ? "" : this.cells[e.cell[row]].name,
      cause: e.cause[row], note: e.note[row] };
  }

  /** The checks that the event at `seq` carries. */
  checksOf(seq) {
    const r = this.reasons, found = [];
    for (let i = lastUpTo(r.seq, seq - 1) + 1; i < r.seq.length && r.seq[i] === seq; i++)
      found.push({ rule: this.checks[r.rule[i]], left: r.left[i], op: r.op[i], right: r.right[i], holds: Boolean(r.holds[i]) });
    return found;
  }

  /** Where the run stands after the event at `seq`. */
  at(seq) {
    const levels = {};
    for (const name of ["d", "p", "f", "held_out", "C_R", "ready", "supply", "version", "published", "step", "burst", "claimed", "enqueued", "done", "held", "paused"])
      levels[name] = this.value(name, seq);
    levels.w = levels.d - levels.f;
    const batch = this.value("batch", seq, -1, -1);
    levels.batch = batch < 0 ? "" : this.names[batch];
    const cells = this.order.filter((i) => this.value("role", seq, i, -1) >= 0).map((i) => {
      const role = this.of("role", i), k = lastUpTo(role.seq, seq), work = this.value("micro_step", seq, i, -1);
      return { cell: i, name: this.cells[i].name, capacity: this.cells[i].capacity, role: this.head.roles[role.value[k]], since: role.t[k],
        load: this.value("load", seq, i), epoch: this.value("epoch", seq, i), version: this.value("version", seq, i),
        microStep: work < 0 ? "" : this.names[work], because: this.value("because", seq, i) };
    });
    return { ...levels, cells };
  }

  /** Names that go with an entity: an execution's evaluations, a group's executions, a batch's micro-steps. */
  related(name) {
    const own = name.slice(2), starts = [];
    if (name.startsWith("e-")) starts.push(`v-${own}-`);
    if (name.startsWith("g-")) starts.push(`e-${own}.`, `v-${own}.`);
    if (name.startsWith("b-")) starts.push(`m-${own}.`);
    if (name.startsWith("h-")) starts.push(`e-h${own}.`, `v-h${own}.`);
    const found = new Set(this.index.has(name) ? [this.index.get(name)] : []);
    if (starts.length) this.names.forEach((each, i) => { if (starts.some((start) => each.startsWith(start))) found.add(i); });
    return found;
  }

  /** Rows of the events of an entity and of what goes with it; of a cell, all that concern it. */
  eventsOf(name) {
    const names = this.related(name), cell = this.cells.findIndex((each) => each.name === name), rows = [];
    const e = this.events;
    for (let row = 0; row < e.seq.length; row++) if (names.has(e.entity[row]) || (cell >= 0 && e.cell[row] === cell)) rows.push(row);
    return rows;
  }

  /** Where an execution had its slot: [{cell, from, to}]. Empty for anything else. */
  slotsOf(rows) {
    const found = [], e = this.events, ends = ["execution.finished", "execution.lost", "execution.cancelled"];
    let now = null;
    for (const row of rows) {
      const { kind } = this.says[e.says[row]], moved = kind === "execution.placed" || kind === "route.moved";
      if (now && (moved || ends.includes(kind))) { found.push({ ...now, to: e.t[row] }); now = null; }
      if (moved) now = { cell: e.cell[row], from: e.t[row] };
    }
    return now ? [...found, { ...now, to: this.head.end }] : found;
  }

  /** What a person typed: {seq}, or {entity, rows}, or {near: names} when it is neither. */
  find(text) {
    const wanted = text.trim().replace(/^#(seq=)?/, "");
    if (/^\d+$/.test(wanted)) return { seq: Math.min(Math.max(Number(wanted), this.head.first), this.head.last) };
    if (this.index.has(wanted) || this.cells.some((each) => each.name === wanted)) return { entity: wanted, rows: this.eventsOf(wanted) };
    const near = [];
    if (wanted) for (const name of this.names) { if (name.includes(wanted)) near.push(name); if (near.length === 12) break; }
    return { near };
  }

  /** The row before or after; `only`: "", "decision", "transition". `among`: rows to stay in. The same row at the end. */
  step(row, direction, only = "", among = null) {
    const fits = (r) => {
      const says = this.says[this.events.says[r]];
      return only === "decision" ? says.decision : only === "transition" ? says.kind === "cell.role-transition" : true;
    };
    if (among && !only) {
      const k = direction > 0 ? lastUpTo(among, row) + 1 : lastUpTo(among, row - 1);
      return k >= 0 && k < among.length ? among[k] : row;
    }
    for (let r = row + direction; r >= 0 && r < this.events.seq.length; r += direction) if (fits(r)) return r;
    return row;
  }

  /** The events behind what was pointed at: {title, rows}. `what` is {cell} or {level} or {mark, seq}; from..to is the time
   *  that the pointer covers. At most `most` of the last kind: those in the middle. */
  behind(what, from, to, most = 60) {
    if (what.mark) return this._behindMark(what);
    const rows = new Set();
    let title;
    if (what.cell !== undefined) {
      const seq = this.events.seq[this.rowAtTime((from + to) / 2)], role = this.of("role", what.cell), k = lastUpTo(role.seq, seq);
      const name = this.cells[what.cell].name;
      title = `${name}: ${k < 0 ? "not there yet" : this.head.roles[role.value[k]]}`;
      for (const each of [this.value("because", seq, what.cell), k < 0 ? 0 : role.seq[k]]) if (each) rows.add(this.rowAt(each));
      const work = this.value("micro_step", seq, what.cell, -1);
      if (work >= 0) { title += `, ${this.names[work]}`; this._rowsOfName(work).forEach((row) => rows.add(row)); }
      this._within(from, to, (row) => this.events.cell[row] === what.cell, most).forEach((row) => rows.add(row));
    } else {
      title = { w: "waterlevel and capacity", ready: "ready groups" }[what.level];
      const series = what.level === "w" ? ["w", "C_R"] : ["ready", "supply"];
      const seqs = new Set();
      for (const name of series) {
        const row = this.of(name);
        for (let i = Math.max(0, lastUpTo(row.t, from - 1)); i < row.t.length && row.t[i] <= to; i++) seqs.add(row.seq[i]);
      }
      const sorted = [...seqs].sort((a, b) => a - b), skip = Math.max(0, (sorted.length - most) >> 1);
      for (const seq of sorted.slice(skip, skip + most)) rows.add(this.rowAt(seq));
    }
    return { title, rows: [...rows].sort((a, b) => a - b) };
  }

  _behindMark({ mark, seq }) {
    const event = this.event(this.rowAt(seq)), kinds = mark === "step"
      ? ["batch.opened", "batch.stream-closed", "batch.join-closed", "batch.stepped"] : ["burst.opened", "burst.ended"];
    const rows = [];
    const from = mark === "step" ? 0 : this.event(this.rowAt(seq)).row;
    for (let row = 0; row < this.events.seq.length; row++) {
      const says = this.says[this.events.says[row]];
      if (kinds.includes(says.kind) && this.events.entity[row] === this.events.entity[event.row]) rows.push(row);
      else if (mark !== "step" && row < from && says.kind.startsWith("weights.") && this.events.seq[row] > this._burstBefore(seq)) rows.push(row);
    }
    return { title: mark === "step" ? `${event.entity}: ${event.note.split(",")[0]}` : `${event.entity} ended: ${event.note}`, rows };
  }

  _burstBefore(seq) {
    const row = this.of("published"), i = lastUpTo(row.seq, seq - 1);
    return i < 0 ? 0 : row.seq[i];
  }

  _rowsOfName(name) {
    if (!this._events) {
      this._events = new Map();
      this.events.entity.forEach((entity, row) => { const rows = this._events.get(entity); if (rows) rows.push(row); else this._events.set(entity, [row]); });
    }
    return this._events.get(name) || [];
  }

  _within(from, to, wanted, most) {
    const rows = [];
    for (let row = lastUpTo(this.events.t, from - 1) + 1; row < this.events.seq.length && this.events.t[row] <= to; row++) if (wanted(row)) rows.push(row);
    const skip = Math.max(0, (rows.length - most) >> 1);
    return rows.slice(skip, skip + most);
  }
}
