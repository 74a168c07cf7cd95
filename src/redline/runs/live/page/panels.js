// Everything but the curves: headlines, memory, the timeline and samples. Text is inserted as text, never as markup.

import { DASHES, format, runColour } from "./charts.js";

export function make(tag, className = "", text = null, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  element.append(...children);
  return element;
}

const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };
const pair = (name, value, mood = "") => make("div", "", null, make("dt", "", name), make("dd", mood, value));

// --- headlines

export class Heads {
  constructor(parent) { [this.parent, this.made] = [parent, new Map()]; }

  draw(runs) {
    for (const [name, head] of this.made) {
      if (!runs.some((run) => run.name === name)) { head.card.remove(); this.made.delete(name); }
    }
    runs.forEach((run) => {
      let head = this.made.get(run.name);
      if (!head) this.made.set(run.name, (head = this.frame(run)));
      this.parent.append(head.card);
      this.fill(head, run, runs.length > 1);
    });
  }

  frame(run) {
    const pill = make("span"), about = make("span", "faint"), far = make("p", "far"), progress = make("progress");
    const title = make("h1", "", null, make("span", "", run.name), pill, about);
    const fast = make("dd"), health = make("dd", "mood"), cost = make("dd");
    const rows = [["Speed", fast], ["Health", health], ["Cost", cost]];
    const facts = make("dl", "facts", null, ...rows.map(([name, dd]) => make("div", "", null, make("dt", "", name), dd)));
    const numbers = make("dl", "numbers"), held = make("p", "held");
    progress.max = 1;
    progress.setAttribute("aria-label", `progress of ${run.name}`);
    const card = make("section", "head", null, title, far, progress, facts, numbers, held);
    return { card, pill, about, far, progress, fast, health, cost, numbers, held, shown: "" };
  }

  fill(head, run, several) {
    const { answers } = run;
    head.card.className = `head ${answers.mood}${several ? " small" : ""}`;
    head.pill.className = `pill ${run.status}`;
    set(head.pill, run.status);
    set(head.about, [run.recipe, run.device].filter(Boolean).join(" · "));
    set(head.far, run.reading < 1 ? `Reading the log: ${Math.floor(100 * run.reading)} %` : answers.far);
    set(head.fast, answers.fast);
    set(head.health, answers.health);
    set(head.cost, answers.cost);
    head.progress.hidden = run.progress === null;
    if (run.progress !== null) head.progress.value = Math.min(1, Math.max(0, run.progress));
    const numbers = figures(run), text = JSON.stringify(numbers);
    if (text !== head.shown) {
      head.numbers.replaceChildren(...numbers.map(([name, value]) => pair(name, value)));
      head.shown = text;
    }
    head.held.hidden = several || !run.held_back.length;
    set(head.held, run.held_back.join(" "));
  }
}

function figures(run) {
  const fixed = (digits) => (v) => v.toFixed(digits);
  const rest = Object.entries(run.metrics).filter(([key]) => !["loss", "tokens", "perplexity", "bits_per_byte", "seconds"].includes(key));
  const all = [
    ["training loss", run.loss, fixed(3)],
    ["validation loss", run.val_loss, fixed(3)],
    ["best", run.best_val_loss === run.val_loss ? null : run.best_val_loss, fixed(3)],
    ["perplexity", run.metrics.perplexity ?? null, (v) => v.toPrecision(4)],
    ["bits per byte", run.metrics.bits_per_byte ?? null, fixed(3)],
    ...rest.slice(0, 4).map(([key, value]) => [key.replaceAll("_", " "), value, (v) => `${+v.toPrecision(4)}`]),
    ["tokens", run.tokens, format.count],
    ["training time", run.hours, format.duration],
    ["peak memory", run.memory_gib, format.gib],
    ["skipped updates", run.skipped || null, (v) => `${v}`],
  ];
  return all.filter(([, value]) => value !== null && value !== undefined).map(([name, value, show]) => [name, show(value)]);
}

// --- the list of runs

export function legend(fieldset, known, shown, onChange) {
  const wanted = JSON.stringify([known, shown.map((run) => [run.name, run.place])]);
  if (fieldset.dataset.shown === wanted) return;
  const focused = document.activeElement?.dataset?.run;
  fieldset.dataset.shown = wanted;
  fieldset.hidden = known.length < 2;
  const labels = known.map(({ name, running }) => {
    const box = make("input"), run = shown.find((one) => one.name === name);
    box.type = "checkbox";
    box.checked = Boolean(run);
    box.dataset.run = name;
    box.addEventListener("change", () => onChange(name, box.checked));
    return make("label", "", null, box, ...(run ? [swatch(run)] : []), make("span", "", name), make("span", "faint", running ? "running" : ""));
  });
  fieldset.replaceChildren(fieldset.firstElementChild, ...labels);
  if (focused) fieldset.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
}

function swatch(run) {
  const name = "http://www.w3.org/2000/svg", svg = document.createElementNS(name, "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(name, "line");
  const attributes = { x1: 0, x2: 30, y1: 6, y2: 6, stroke: runColour(run.place), "stroke-width": 2.5 };
  for (const [key, value] of Object.entries(attributes)) line.setAttribute(key, value);
  if (DASHES[run.place % DASHES.length].length) line.setAttribute("stroke-dasharray", DASHES[run.place % DASHES.length].join(" "));
  svg.append(line);
  return svg;
}

// --- the ranks side by side

export function cards(section, parent, runs) {
  const several = runs.filter((run) => run.cards);
  const shown = JSON.stringify(several.map((run) => [run.name, run.cards]));
  section.hidden = !several.length;
  if (parent.dataset.shown === shown) return;
  parent.dataset.shown = shown;
  parent.replaceChildren(...several.map((run) => cardsCard(run, runs.length > 1)));
}

function cardsCard(run, several) {
  const { count, spreads, stragglers } = run.cards;
  const head = make("tr", "", null, ...["", "min", "median", "max"].map((name) => make("th", "", name)));
  const rows = spreads.map((one) => {
    const cell = (value, rank) => make("td", "", `${value.toFixed(one.decimals)} `, ...(rank === null || one.low === one.high ? [] : [make("span", "faint", `rank ${rank}`)]));
    return make("tr", "", null, make("th", "", `${one.name} (${one.unit})`), cell(one.low, one.low_rank), cell(one.median, null), cell(one.high, one.high_rank));
  });
  const notes = stragglers.map((text) => make("p", "straggler", `${text}.`));
  const table = make("table", "spreads", null, make("thead", "", null, head), make("tbody", "", null, ...rows));
  const title = make("div", "faint", `${several ? `${run.name}: ` : ""}${count} ranks, each the median of the last log lines`);
  return make("div", "card", null, title, ...notes, table);
}

// --- memory by part

export function memory(section, parent, runs) {
  const planned = runs.filter((run) => Object.keys(run.plan.memory).length && run.plan.memory_available);
  const shown = JSON.stringify(planned.map((run) => [run.name, run.plan, run.memory_gib]));
  section.hidden = !planned.length;
  if (parent.dataset.shown === shown) return;
  parent.dataset.shown = shown;
  parent.replaceChildren(...planned.map((run) => memoryCard(run, planned.length > 1)));
}

function memoryCard(run, several) {
  const { memory: parts, memory_peak: peak, memory_available: available } = run.plan;
  const { gib } = format;
  const onGpu = run.held_lines.all > 0;  // on a CPU the measured peak is that of the whole process, which is not planned
  const total = onGpu ? available : Math.max(peak * 1.1, Object.values(parts).reduce((a, b) => a + b, 0));
  const bar = make("div", "bar"), list = make("ul", "parts");
  bar.setAttribute("role", "img");
  Object.entries(parts).forEach(([name, value], place) => {
    const piece = make("i", `part-${place}`);
    piece.style.width = `${(100 * value) / total}%`;
    piece.title = `${name} ${gib(value)}`;
    bar.append(piece);
    list.append(make("li", "", null, make("i", `part-${place}`), `${name} ${gib(value)}`));
  });
  let measured = run.memory_gib === null ? "" : `measured ${gib(run.memory_gib)}`;
  if (onGpu && run.memory_gib !== null) {
    const mark = make("i", "mark");
    mark.style.left = `${Math.min(99.6, (100 * run.memory_gib) / total)}%`;
    mark.title = measured;
    bar.append(mark);
    measured += " at the peak (the black mark)";
  } else if (measured) {
    measured += " at the peak of the whole process, including Python and libraries";
  }
  const description = [`planned ${gib(peak)} of ${gib(available)}`, measured].filter(Boolean).join(", ");
  bar.setAttribute("aria-label", description);
  return make("div", "card", null, make("div", "faint", `${several ? `${run.name}: ` : ""}${description}`), bar, list);
}

// --- the timeline and samples: newest first

export function timeline(section, list, runs) {
  const notes = runs.flatMap((run) => run.notes.map((note) => ({ ...note, run: run.name })));
  notes.sort((a, b) => (b.time ?? 0) - (a.time ?? 0) || b.number - a.number);
  section.hidden = !notes.length;
  const shown = JSON.stringify(notes.map((note) => [note.run, note.number, note.step]));
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...notes.slice(0, 200).map((note) => {
    const step = note.step === null ? "" : `step ${note.step.toLocaleString("en")}`;
    const message = `${runs.length > 1 ? `${note.run}: ` : ""}${note.message}`;
    return make("li", "", null, make("span", "faint", step), make("span", `kind ${note.kind}`, note.kind), make("span", "", message));
  }));
}

export function samples(section, parent, runs) {
  const all = runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run: run.name })));
  all.sort((a, b) => (b.step ?? 0) - (a.step ?? 0) || b.number - a.number);
  section.hidden = !all.length;
  const shown = JSON.stringify(all.map((sample) => [sample.run, sample.number]));
  if (parent.dataset.shown === shown) return;
  parent.dataset.shown = shown;
  parent.replaceChildren(...all.slice(0, 6).map((sample) => {
    const title = [runs.length > 1 ? sample.run : "", sample.label, sample.step === null ? "" : `step ${sample.step}`];
    const text = make("pre", "", null, make("b", "", sample.prompt), sample.text);
    text.tabIndex = 0;
    return make("div", "card sample", null, make("span", "faint", title.filter(Boolean).join(" · ")), text);
  }));
}
