// Asks the server once a second for what is new, and draws it. Nothing else is ever asked for.

import { Charts } from "./charts.js";
import { Columns } from "./columns.js";
import { Heads, legend, memory, samples, timeline } from "./panels.js";

const EVERY_MS = 1000, PATIENCE_MS = 8000;
const get = (id) => document.getElementById(id);
const charts = new Charts(get("charts")), heads = new Heads(get("heads"));
const have = new Map();  // name → what the page has of a run
const places = new Map();  // name → which colour and dash; kept for as long as the page is open
let known = [], chosen = null;  // `chosen`: names, once someone chose; until then the server does
let failures = 0;

function wanted() {
  if (chosen) return [...chosen].filter((name) => known.some((run) => run.name === name));
  return known.filter((run) => run.first).map((run) => run.name);
}

function question() {
  const query = new URLSearchParams();
  for (const name of wanted()) {
    const run = have.get(name);
    query.append("run", name);
    query.append("at", run ? [run.generation, run.steps.buckets, run.evals.buckets, run.number].join(".") : "");
  }
  return `/api/state?${query}`;
}

function take(told) {
  known = told.known;
  for (const { steps, evals, samples: texts, notes, ...facts } of told.runs) {
    let run = have.get(facts.name);
    if (!run || run.generation !== facts.generation) {
      run = { steps: new Columns(), evals: new Columns(), samples: [], notes: [], generation: -1, number: 0 };
      have.set(facts.name, run);
    }
    // a question that was overtaken by another brings what is known already
    const fresh = (list) => list.filter((item) => item.number > run.number);
    run.samples = [...run.samples, ...fresh(texts)].slice(-40);
    run.notes = [...run.notes, ...fresh(notes)].slice(-200);
    run.steps.take(steps);
    run.evals.take(evals);
    Object.assign(run, facts);
  }
  return told;
}

function draw(told) {
  const begin = performance.now();
  const names = wanted().filter((name) => have.has(name));
  for (const name of names) if (!places.has(name)) places.set(name, free());
  const runs = names.map((name) => Object.assign(have.get(name), { place: places.get(name) }));
  get("empty").hidden = runs.length > 0;
  get("controls").hidden = !known.length;
  if (!runs.length) {
    get("empty").textContent = known.length ? "No run is chosen."
      : `No run yet${told.waiting_in ? ` in ${told.waiting_in}/` : ""}: it will show here as soon as one begins.`;
  }
  heads.draw(runs);
  legend(get("runs"), known, runs, choose);
  charts.draw(runs);
  memory(get("memory"), get("bars"), runs);
  timeline(get("timeline"), get("notes"), runs);
  samples(get("written"), get("samples"), runs);
  const first = runs[0];
  document.title = first ? `${first.progress === null ? "" : `${Math.round(100 * first.progress)} % `}${first.name} · redline` : "redline";
  document.body.dataset.drawn = String(1 + Number(document.body.dataset.drawn || 0));
  document.body.dataset.drawMs = (performance.now() - begin).toFixed(1);
}

function free() {
  const taken = new Set(wanted().map((name) => places.get(name)));
  let place = 0;
  while (taken.has(place)) place++;
  return place;
}

function choose(name, on) {
  chosen = new Set(wanted());
  if (on) chosen.add(name); else chosen.delete(name);
  places.delete(name);
  ask();
}

let asking = null, timer = 0;

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  let soon = EVERY_MS;
  const patience = setTimeout(() => mine.abort(), PATIENCE_MS);
  try {
    const answer = await fetch(question(), { signal: mine.signal, credentials: "same-origin" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const told = take(await answer.json());
    const waiting = wanted().some((name) => !have.has(name));
    draw(told);
    failures = 0;
    get("link").textContent = told.runs.some((run) => run.status === "running") ? "live" : "";
    if (waiting || told.runs.some((run) => run.reading < 1)) soon = 20;
  } catch (error) {
    if (mine !== asking) return;  // overtaken by a newer question
    failures += 1;
    soon = Math.min(8000, EVERY_MS * 2 ** failures);
    const why = error.name === "AbortError" || error instanceof TypeError ? "`redline watch` does not answer" : error.message;
    get("link").textContent = `${why}; trying again`;
  } finally {
    clearTimeout(patience);
  }
  if (mine === asking && !document.hidden) timer = setTimeout(ask, soon);
}

get("controls").addEventListener("submit", (event) => event.preventDefault());
get("controls").addEventListener("change", (event) => {
  if (event.target.name === "axis" || event.target.id === "logarithmic") {
    charts.along(document.querySelector("[name=axis]:checked").value, get("logarithmic").checked);
  }
});
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else ask(); });
ask();
