// Draws the sections of an answer from its events, by their kind. All text is set as text, never as HTML.

export function make(name, options = {}, ...children) {
  const { text, ...rest } = options;
  const element = Object.assign(document.createElement(name), rest);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.1 ? `${(100 * p).toFixed(1)} %` : `${(100 * p).toPrecision(2)} %`);
const level = (p) => [0.05, 0.2, 0.5, 0.8, 0.95].filter((bound) => p >= bound).length;  // 0 (unlikely) to 5
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

// The tooltip of a token: its probability, and the tokens that were likelier or nearly as likely.
const tip = document.getElementById("tip");
const facts = new WeakMap();  // element of a token → what its tooltip shows

function show(element) {
  const fact = facts.get(element);
  if (!fact) return hide();
  const rows = fact.likeliest.map(([text, logprob]) => make("tr", { className: text === fact.text ? "own" : "" },
    make("td", { text: visible(text) }), make("td", { text: percent(Math.exp(logprob)) })));
  const head = fact.p === null ? "filled after the end" : percent(fact.p);
  tip.replaceChildren(make("b", { text: `${visible(fact.text)}  ${head}` }), ...(rows.length ? [make("table", {}, ...rows)] : []));
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + 4 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${(below ? box.bottom + 4 : box.top - tip.offsetHeight - 4) + scrollY}px`;
}

export function hide() { tip.hidden = true; }

// Tokens can be reached by Tab to their section and then the arrow keys.
function explore(list) {
  let current = null;
  const move = (to) => {
    current?.classList.remove("current");
    current = to;
    if (!current) return hide();
    current.classList.add("current");
    current.scrollIntoView({ block: "nearest" });
    show(current);
  };
  list.tabIndex = 0;
  list.addEventListener("pointerover", (event) => show(event.target));
  list.addEventListener("pointerleave", hide);
  list.addEventListener("blur", () => move(null));
  list.addEventListener("keydown", (event) => {
    const items = [...list.children].flatMap((child) => (facts.has(child) ? [child] : [...child.children].filter((one) => facts.has(one))));
    const at = items.indexOf(current);
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? items.length - 1 : at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to === undefined || !items.length) { if (event.key === "Escape") move(null); return; }
    event.preventDefault();
    move(items[Math.max(0, Math.min(items.length - 1, to))]);
  });
}

class Section {
  constructor(event) {
    this.element = make("section", { className: "part" });
    if (event.title) this.element.append(make("h3", { text: event.title }, make("span", { className: "faint", text: event.note ? ` ${event.note}` : "" })));
    this.tokens = 0;
    this.text = "";
  }

  body(className) {
    if (!this.list) {
      this.list = make("div", { className });
      this.list.setAttribute("role", "group");
      this.list.setAttribute("aria-label", "Tokens: the arrow keys show the probability of each");
      explore(this.list);
      this.element.append(this.list);
    }
    return this.list;
  }

  token(event) {
    const p = event.logprob === null ? null : Math.exp(event.logprob);
    const element = make("span", { className: p === null ? "token" : `token p-${level(p)}`, text: event.text });
    if (p !== null) facts.set(element, { text: event.text, p, likeliest: event.likeliest });
    this.body("tokens").append(element);
    this.tokens += 1;
    this.text += event.text;
  }

  cells(event) {
    const list = this.body("cells");
    this.places = [];
    for (const size of event.blocks) {
      const cells = Array.from({ length: size }, () => make("span", { className: "cell masked", text: "▒" }));
      this.places.push(...cells);
      list.append(make("span", { className: "block" }, ...cells));
    }
  }

  unmasked(event) {
    event.places.forEach((place, i) => {
      const cell = this.places[place], p = event.probabilities[i], text = event.texts[i];
      if (!cell) return;
      cell.textContent = p === null || text === "" ? "·" : text.replaceAll("\n", "⏎");
      cell.className = p === null ? "cell end" : `cell new p-${level(p)}`;
      facts.set(cell, { text, p, likeliest: [] });
      this.tokens += 1;
    });
    this.forwards = event.forwards;
  }

  finished(event) {
    if (this.places) this.element.append(make("p", { className: "whole", text: event.text }));
    else if (!this.list) this.body("tokens").append(make("span", { className: "token", text: event.text }));
    if (!event.text.trim()) this.element.append(make("p", { className: "faint", text: "(an empty answer)" }));
    this.text = event.text;
    this.reason = this.places ? "" : event.reason;  // the layout decides the length of a denoised section
  }
}

// The latents as a matrix of colours: blue below zero, red above, by the largest magnitude.
function heatMap(event) {
  const rows = event.rows, height = rows.length, width = rows[0]?.length ?? 0;
  const largest = Math.max(1e-9, ...rows.flat().map(Math.abs));
  const canvas = make("canvas", { width, height, className: "heat" });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const draw = () => {
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    const paper = scheme.matches ? [30, 28, 27] : [255, 255, 255];
    const low = scheme.matches ? [86, 180, 233] : [0, 90, 160], high = scheme.matches ? [255, 106, 92] : [200, 40, 31];
    rows.flat().forEach((value, i) => {
      const share = Math.min(1, Math.abs(value) / largest), end = value < 0 ? low : high;
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = paper[c] + share * (end[c] - paper[c]);
      image.data[4 * i + 3] = 255;
    });
    context.putImageData(image, 0, 0);
  };
  scheme.addEventListener("change", draw);
  draw();
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${event.title}: ${height} rows of ${width} values from ${(-largest).toFixed(2)} to ${largest.toFixed(2)}`);
  return make("section", { className: "part" }, make("h3", { text: event.title },
    make("span", { className: "faint", text: ` ${height} × ${width}, blue −${largest.toFixed(2)} to red +${largest.toFixed(2)}` })), canvas);
}

// One model's answer.
export class Answer {
  constructor(title) {
    this.element = make("article", { className: "card answer" });
    this.state = make("span", { className: "faint state", text: "…" });
    this.element.append(make("header", {}, make("b", { text: title }), this.state));
    this.sections = new Map();
    this.begun = 0;
  }

  get text() { return [...this.sections.values()].map((section) => section.text).join("\n"); }

  take(event) {
    if (event.kind === "waiting") {
      if (!this.begun) this.state.textContent = event.ahead ? `waiting, ${event.ahead} ahead` : "reading the prompt";
    } else if (event.kind === "failed") {
      this.fail(event.message);
    } else if (event.kind === "heat_map") {
      this.element.append(heatMap(event));
    } else if (event.kind === "section") {
      const section = new Section(event);
      this.sections.set(event.section, section);
      this.element.append(section.element);
    } else if (event.kind === "done") {
      this.finish();
    } else if (["token", "cells", "unmasked", "finished"].includes(event.kind)) {
      if (!this.begun && event.kind !== "cells") this.begun = performance.now();
      this.sections.get(event.section)?.[event.kind](event);
      this.state.textContent = this.speed();
    }
  }

  speed() {
    const sections = [...this.sections.values()], sum = (key) => sections.reduce((total, one) => total + (one[key] ?? 0), 0);
    const tokens = sum("tokens"), seconds = (performance.now() - this.begun) / 1000;
    const passes = Math.max(0, ...sections.map((one) => one.forwards ?? 0));
    const parts = [`${tokens} tokens`];
    if (passes) parts.push(`${passes} passes`);
    if (tokens > 2 && seconds > 0.05) parts.push(`${(tokens / seconds).toFixed(1)} tokens/s`);
    return parts.join(" · ");
  }

  finish() {
    const reasons = [...new Set([...this.sections.values()].map((one) => one.reason).filter(Boolean))];
    const cut = reasons.includes("length");
    if (!this.failed) this.state.textContent = `${this.speed()}${reasons.length ? cut ? " · cut at the limit" : " · ended" : ""}`;
    this.element.dataset.state = this.failed ? "failed" : "done";
  }

  stopped() {
    if (this.element.dataset.state) return;
    this.state.textContent = this.begun ? `${this.speed()} · stopped` : "stopped";
    this.element.dataset.state = "stopped";
  }

  fail(message) {
    this.failed = true;
    this.state.textContent = "failed";
    this.element.append(make("p", { className: "error", text: message }));
    this.element.dataset.state = "failed";
  }
}
