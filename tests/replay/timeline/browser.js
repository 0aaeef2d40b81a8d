// Runs a timeline page without a browser: a document of a few elements, a canvas that writes down what is drawn on it.
// node browser.js PAGE < steps (JSON: [[verb, ...arguments], ...]) > answers (JSON)
"use strict";
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.listeners = {}; this.attributes = {}; this.dataset = {}; this.style = {}; this.text = ""; this.value = ""; this.hidden = false; this.open = false; }
  set textContent(text) { this.text = text; this.children = []; }
  get textContent() { return this.text + this.children.map((each) => (each instanceof Element ? each.textContent : each)).join(""); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.text = ""; this.children = children; }
  after() {}
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name]; }
  addEventListener(kind, run) { (this.listeners[kind] = this.listeners[kind] || []).push(run); }
  removeEventListener(kind, run) { this.listeners[kind] = this.listeners[kind].filter((each) => each !== run); }
  dispatch(kind, event) { for (const run of [...(this.listeners[kind] || [])]) run({ target: this, preventDefault() {}, ...event }); }
  click() { this.dispatch("click", {}); }
  focus() { document.activeElement = this; }
  showModal() { this.open = true; }
  setPointerCapture() {}
  get clientWidth() { return 1200; }
  get clientHeight() { return 800; }
  get offsetWidth() { return 100; }
  get offsetTop() { return 0; }
  getContext() { return context; }
  *all() { yield this; for (const each of this.children) if (each instanceof Element) yield* each.all(); }
}

const drawn = { texts: [], fills: 0, strokes: 0, bad: 0 };
const context = new Proxy({}, {
  get: (target, name) => name in target ? target[name] : (...args) => {
    if (args.some((each) => typeof each === "number" && !Number.isFinite(each))) drawn.bad++;
    if (name === "fillText") drawn.texts.push(args[0]);
    if (name === "fillRect") drawn.fills++;
    if (name === "stroke") drawn.strokes++;
  },
  set: (target, name, value) => { target[name] = value; if (value === undefined) drawn.bad++; return true; },
});

const page = fs.readFileSync(process.argv[2], "utf8");
const part = (pattern) => pattern.exec(page)[1];
const elements = {};
for (const [, tag, id] of page.matchAll(/<(\w+)[^>]* id="(\w+)"/g)) elements[id] = new Element(tag);
elements.data.text = part(/id="data">([^<]*)</);
elements.meaning.text = part(/id="meaning">([^<]*)</);
const root = new Element("html"), windowed = new Element("window");
const document = { getElementById: (id) => elements[id], createElement: (tag) => new Element(tag), documentElement: root, activeElement: null };
const colours = Object.fromEntries([...part(/:root\{([^}]*)\}/).matchAll(/--([\w-]+): ([^;]+);/g)].map(([, name, value]) => [`--${name}`, value]));
const world = {
  document, console, atob, Blob, Response, DecompressionStream, location: { hash: process.argv[3] || "" },
  history: { replaceState: (state, title, address) => { world.location.hash = address; } },
  matchMedia: () => ({ matches: false }), getComputedStyle: () => ({ getPropertyValue: (name) => colours[name] || "" }),
  requestAnimationFrame: (run) => { queueMicrotask(run); return 1; }, devicePixelRatio: 1, addEventListener: (kind, run) => windowed.addEventListener(kind, run),
};
vm.createContext(world);
for (const [, script] of page.matchAll(/<script>([\s\S]*?)<\/script>/g)) vm.runInContext(script, world);

const verbs = {
  key: (key, held = {}) => windowed.dispatch("keydown", { key, target: document.activeElement || elements.chart, ...held }),
  search: (text) => { elements.search.focus(); elements.search.value = text; elements.search.dispatch("change", {}); },
  click: (x, y) => { const at = { offsetX: x, offsetY: y, pointerId: 1, buttons: 1 }; elements.chart.dispatch("pointerdown", at); elements.chart.dispatch("pointerup", at); },
  hover: (x, y) => elements.chart.dispatch("pointermove", { offsetX: x, offsetY: y, buttons: 0 }),
  wheel: (x, deltaY) => elements.chart.dispatch("wheel", { offsetX: x, offsetY: 300, deltaX: 0, deltaY }),
  press: (id) => elements[id].click(),
  follow: (text) => { for (const each of elements.panel.all()) if (each.textContent === text && each.listeners.click) { each.click(); return; } throw new Error(`no link ${text}`); },
  ask: (expression) => vm.runInContext(expression, world),
};

async function main() {
  while (!world.timeline) await new Promise((resolve) => setImmediate(resolve));
  const answers = [];
  for (const [verb, ...rest] of JSON.parse(fs.readFileSync(0, "utf8"))) {
    Object.assign(drawn, { texts: [], fills: 0, strokes: 0 });
    const said = verbs[verb](...rest);
    await new Promise((resolve) => setImmediate(resolve));
    answers.push({ said: said === undefined ? null : said, address: world.location.hash, panel: elements.panel.textContent, tip: elements.tip.hidden ? "" : elements.tip.textContent, drawn: { ...drawn }, ground: root.dataset.ground });
  }
  process.stdout.write(JSON.stringify(answers));
}
main();
