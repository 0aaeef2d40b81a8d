// The column beside the picture: one event, where the run stands after it, and the events behind what was pointed at.
"use strict";

/** An element; text goes in as text, never as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value) made.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== "") made.append(child);
  return made;
}

class Panel {
  /** `go(seq)` moves the page to an event; `search(text)` looks something up. */
  constructor(root, model, { go, search }) {
    this.root = root; this.model = model; this.go = go; this.search = search;
  }

  show(row, { pointed = null, found = null }) {
    const model = this.model, event = model.event(row), state = model.at(event.seq);
    const parts = [...this._event(event), ...this._state(state), ...this._next(state)];
    if (found) parts.push(...this._list(`${found.entity}: ${found.rows.length} events`, this._around(found.rows, row), row));
    if (pointed) parts.push(...this._list(`behind ${pointed.title}`, pointed.rows, row));
    parts.push(...this._cells(state));
    this.root.replaceChildren(...parts);
  }

  link(text, run) { return element("a", { onclick: run, role: "button" }, text); }
  sequence(seq) { return this.model.lists(seq) ? this.link(`#${seq}`, () => this.go(seq)) : `#${seq} (in the log)`; }
  name(text) { return this.link(text, () => this.search(text)); }

  _event(event) {
    const clock = new Date(this.model.head.start_us / 1000 + event.t).toISOString().replace("T", " ").slice(0, 19);
    return [
      element("h2", {}, `sequence ${event.seq}, ${duration(event.t)} after the start`),
      element("p", { class: "faint" }, `${clock} UTC`),
      element("p", { class: event.decision ? "decision" : "" }, element("b", {}, event.kind), " ", this.name(event.entity)),
      element("p", {}, event.note),
      element("p", { class: "faint" }, event.decision ? `decided by ${event.owner}` : `reported by ${event.owner}`,
        event.cause ? [", because of ", this.sequence(event.cause)] : ""),
      this._checks(event.seq),
    ];
  }

  _checks(seq) {
    const checks = this.model.checksOf(seq);
    if (!checks.length) return "";
    return element("table", {}, checks.map((each) => element("tr", { class: each.holds ? "" : "no" },
      element("td", {}, each.holds ? "\u2713" : "\u2717"), element("td", {}, each.rule),
      element("td", { class: "number" }, `${number(each.left)} ${each.op.replace("<=", "\u2264").replace(">=", "\u2265").replace("==", "=")} ${number(each.right)}`))));
  }

  _state(s) {
    const { rules } = this.model.head, bound = rules.rho_min * rules.B;
    const rows = [
      ["waterlevel", `w = ${s.d} - ${s.f} = ${s.w}`],
      ["executions", `${s.p - s.f} run, ${s.d - s.p} wait` + (s.held_out ? `, ${s.held_out} held out` : "")],
      ["capacity", `C_R = ${s.C_R}, ${rules.C_e} a cell`],
      ["ready", `groups: ${s.ready}, needed ${s.supply}, rho_min B = ${number(bound)}`],
      ["batch", s.batch ? [this.name(s.batch), `: ${s.claimed} of ${rules.B} groups, ${s.done} of ${s.enqueued} micro-steps done`] : "none is open"],
      ["steps", `${s.step} of ${rules.steps}, burst ${s.burst} of ${rules.mu} steps`],
      ["version", `${s.version} trained, ${s.published} published`],
    ];
    return [element("h2", {}, s.paused ? "state (paused)" : "state"),
      element("table", {}, rows.map(([name, text]) => element("tr", {}, element("td", { class: "faint" }, name), element("td", {}, text))))];
  }

  _next(s) {
    if (!s.held) return [];
    const event = this.model.event(this.model.rowAt(s.held));
    return [element("h2", {}, "what keeps ", event.entity, " from training"),
      element("p", { class: "faint" }, "said at ", this.sequence(s.held), `, ${duration(event.t)}`), this._checks(s.held)];
  }

  _cells(s) {
    const head = element("tr", {}, ...["cell", "role", "since"].map((text) => element("th", {}, text)),
      ...["load", "v"].map((text) => element("th", { class: "number" }, text)));
    const rows = s.cells.map((each) => {
      const state = each.role === "training" ? (each.microStep ? "training" : "idle") : each.role;
      const said = each.role === "training" ? each.microStep || "waits" : each.role;
      return element("tr", {}, element("td", {}, this.name(each.name)),
        element("td", {}, element("span", { class: "swatch", style: `background: var(--${state})` }), said, each.because ? [" ", this.sequence(each.because)] : ""),
        element("td", {}, duration(each.since)), element("td", { class: "number" }, `${each.load}/${each.capacity}`), element("td", { class: "number" }, String(each.version)));
    });
    return [element("h2", {}, "cells"), element("table", { class: "cells" }, head, rows)];
  }

  _list(title, rows, here) {
    return [element("h2", {}, title), ...rows.map((row) => {
      const event = this.model.event(row);
      return element("div", { class: row === here ? "event here" : "event", onclick: () => this.go(event.seq) },
        element("span", { class: "faint" }, duration(event.t)),
        element("span", { class: event.decision ? "decision" : "" }, element("b", {}, event.kind), ` ${event.entity} `, element("span", { class: "faint" }, event.note)));
    })];
  }

  /** Forty of many rows, those around `row`. */
  _around(rows, row) {
    const from = Math.max(0, Math.min(lastUpTo(rows, row) - 20, rows.length - 40));
    return rows.slice(from, from + 40);
  }
}
