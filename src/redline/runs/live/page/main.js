// Polls the server once a second for new data and draws them. The page sends no other requests.

import { Charts } from "./charts.js";
import { Columns } from "./columns.js";
import { Heads, cards, legend, memory, samples, timeline } from "./panels.js";

const POLL_MS = 1000, TIMEOUT_MS = 8000, MAX_RETRY_MS = 8000;
const get = (id) => document.getElementById(id);
const charts = new Charts(get("charts")), heads = new Heads(get("heads"));
const runs = new Map();  // name → the state of a run, as far as the page has received it
const styles = new Map();  // name → index of its colour and dash, kept for as long as the page is open
let known = [], selected = null;  // `selected`: names, once the user has chosen; until then the server chooses
let failures = 0;

function shownNames() {
  if (selected) return [...selected].filter((name) => known.some((run) => run.name === name));
  return known.filter((run) => run.first).map((run) => run.name);
}

function requestUrl() {
  const query = new URLSearchParams();
  for (const name of shownNames()) {
    const run = runs.get(name);
    query.append("run", name);
    query.append("at", run ? [run.generation, run.steps.buckets, run.evals.buckets, run.number].join(".") : "");
  }
  return `/api/state?${query}`;
}

function merge(answer) {
  known = answer.known;
  for (const { steps, evals, samples: newSamples, notes, ...facts } of answer.runs) {
    let run = runs.get(facts.name);
    if (!run || run.generation !== facts.generation) {
      run = { steps: new Columns(), evals: new Columns(), samples: [], notes: [], generation: -1, number: 0 };
      runs.set(facts.name, run);
    }
    // The answer to an older request may arrive after a newer one, with notes that the page has already.
    const unseen = (list) => list.filter((item) => item.number > run.number);
    run.samples = [...run.samples, ...unseen(newSamples)].slice(-40);
    run.notes = [...run.notes, ...unseen(notes)].slice(-200);
    run.steps.replaceFrom(steps);
    run.evals.replaceFrom(evals);
    Object.assign(run, facts);
  }
}

function draw(answer) {
  const begin = performance.now();
  const names = shownNames().filter((name) => runs.has(name));
  for (const name of names) if (!styles.has(name)) styles.set(name, freeStyle());
  const shown = names.map((name) => Object.assign(runs.get(name), { place: styles.get(name) }));
  get("empty").hidden = shown.length > 0;
  get("controls").hidden = !known.length;
  if (!shown.length) {
    get("empty").textContent = known.length ? "No run is selected."
      : `No runs yet${answer.waiting_in ? ` in ${answer.waiting_in}/` : ""}. A run appears here as soon as it starts.`;
  }
  heads.draw(shown);
  legend(get("runs"), known, shown, select);
  charts.draw(shown);
  cards(get("cards"), get("spreads"), shown);
  memory(get("memory"), get("bars"), shown);
  timeline(get("timeline"), get("notes"), shown);
  samples(get("written"), get("samples"), shown);
  const first = shown[0];
  document.title = first ? `${first.progress === null ? "" : `${Math.round(100 * first.progress)} % `}${first.name} · redline` : "redline";
  document.body.dataset.drawn = String(1 + Number(document.body.dataset.drawn || 0));
  document.body.dataset.drawMs = (performance.now() - begin).toFixed(1);
}

function freeStyle() {
  const taken = new Set(shownNames().map((name) => styles.get(name)));
  let place = 0;
  while (taken.has(place)) place++;
  return place;
}

function select(name, on) {
  selected = new Set(shownNames());
  if (on) selected.add(name); else selected.delete(name);
  styles.delete(name);
  poll();
}

let request = null, timer = 0;

async function poll() {
  clearTimeout(timer);
  request?.abort();
  const mine = (request = new AbortController());
  let delay = POLL_MS;
  const timeout = setTimeout(() => mine.abort(), TIMEOUT_MS);
  try {
    const response = await fetch(requestUrl(), { signal: mine.signal, credentials: "same-origin" });
    if (!response.ok) throw new Error((await response.text()).trim());
    const answer = await response.json();
    merge(answer);
    const missing = shownNames().some((name) => !runs.has(name));
    draw(answer);
    failures = 0;
    get("link").textContent = answer.runs.some((run) => run.status === "running") ? "live" : "";
    if (missing || answer.runs.some((run) => run.reading < 1)) delay = 20;  // the server is still reading a long log
  } catch (error) {
    if (mine !== request) return;  // a newer request replaced this one
    failures += 1;
    delay = Math.min(MAX_RETRY_MS, POLL_MS * 2 ** failures);
    const why = error.name === "AbortError" || error instanceof TypeError ? "`redline watch` does not answer" : error.message;
    get("link").textContent = `${why}; trying again`;
  } finally {
    clearTimeout(timeout);
  }
  if (mine === request && !document.hidden) timer = setTimeout(poll, delay);
}

get("controls").addEventListener("submit", (event) => event.preventDefault());
get("controls").addEventListener("change", (event) => {
  if (event.target.name === "axis" || event.target.id === "logarithmic") {
    charts.setAxis(document.querySelector("[name=axis]:checked").value, get("logarithmic").checked);
  }
});
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else poll(); });
poll();
