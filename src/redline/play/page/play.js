// The page's form: which models, which panel, the prompt, the settings; and the conversation that follows from them.

import { Answer, hide, make } from "./sections.js";
import { stream } from "./stream.js";

const get = (id) => document.getElementById(id);
const NUMBERS = [
  { name: "temperature", title: "Temperature", value: 0.8, min: 0, max: 10, step: 0.1, option: "--temperature" },
  { name: "top_p", title: "Top-p", value: 0.95, min: 0.01, max: 1, step: 0.01, option: "--top-p" },
  { name: "top_k", title: "Top-k", value: "", min: 1, max: 1048576, step: 1, option: "--top-k", hint: "off" },
  { name: "tokens", title: "Most tokens", value: 200, min: 1, max: 8192, step: 1, option: "--tokens" },
  { name: "seed", title: "Seed", value: 0, min: 0, max: 9007199254740991, step: 1, option: "--seed" },
];
let models = [], running = null;
let columns = [];  // one for each model that answers: { model, messages }

const chosen = () => models.find((model) => model.name === get("model").value);
const beside = () => models.find((model) => model.name === get("beside").value);
const panel = () => {
  const model = chosen();
  return model.panels.find((one) => one.name === document.querySelector("[name=panel]:checked")?.value) ?? model.panels[0];
};
// The panel of another model that takes the same kind of input.
const panelOf = (model) => model.panels.find((one) => one.name === panel().name)
  ?? model.panels.find((one) => one.input === panel().input)
  ?? model.panels.find((one) => (one.input === "text") === (panel().input === "text"));

// --- the form

function choosePanel() {
  const model = chosen();
  get("panels").replaceChildren(make("legend", { text: "Panel" }), ...model.panels.map((one, i) => make("label", {},
    make("input", { type: "radio", name: "panel", value: one.name, checked: i === 0 }), one.title)));
  get("panels").hidden = model.panels.length < 2;
  fillForm();
}

function fillForm() {
  const now = panel();
  get("prompt").placeholder = now.hint;
  get("prompt-label").textContent = { chat: "Message", question: "Question", text: "Text" }[now.input] ?? "Prompt";
  get("system-part").hidden = now.input !== "chat";
  get("system").placeholder = now.system === null ? "that of the chat template" : now.system;
  get("again").textContent = now.input === "chat" ? "New conversation" : "Clear";
  get("fields").replaceChildren(...now.fields.map(([name, title]) => make("label", { className: "field" }, title,
    make("textarea", { name, rows: 2 }))));
  const numbers = NUMBERS.filter((one) => now.controls.includes(one.name)).map((one) => make("label", {}, one.title,
    make("input", { type: "number", id: one.name, value: values[one.name] ?? one.value, min: one.min, max: one.max, step: one.step, placeholder: one.hint ?? "" })));
  const choices = now.choices.map((one) => make("label", {}, one.title, make("select", { id: `choice-${one.name}` },
    ...one.values.map((value) => make("option", { value, text: value })))));
  get("numbers").replaceChildren(...choices, ...numbers);
  restart();
}

const values = {};  // settings that the user changed, kept when the panel changes
get("numbers").addEventListener("input", (event) => { if (event.target.type === "number") values[event.target.id] = event.target.value; });

function restart() {
  running?.abort();
  hide();
  get("link").textContent = "";
  columns = [chosen(), beside()].filter((model, i, all) => model && all.indexOf(model) === i).map((model) => ({ model, messages: [] }));
  get("turns").replaceChildren();
  get("command").hidden = true;
  get("empty").hidden = false;
  const names = columns.map((column) => column.model.title).join(" beside ");
  get("empty").textContent = `${names}. ${panel().input === "text" ? "Give it a text." : "Ask it something."}`;
}

// --- a request

function settings() {
  const sampling = {}, choices = {}, fields = {};
  for (const one of NUMBERS) {
    const text = get(one.name)?.value;
    if (text) sampling[one.name] = Number(text);
  }
  for (const one of panel().choices) choices[one.name] = get(`choice-${one.name}`).value;
  for (const [name] of panel().fields) fields[name] = document.querySelector(`#fields [name="${name}"]`).value;
  return { sampling, choices, fields };
}

function request(column, prompt, system) {
  const now = panelOf(column.model), { sampling, choices, fields } = settings();
  const turns = now.input === "chat" ? column.messages : [];
  const first = system && now.input === "chat" ? [{ role: "system", content: system }] : [];
  const known = Object.fromEntries(now.choices.map((one) => [one.name, choices[one.name]]).filter(([name, value]) =>
    now.choices.find((one) => one.name === name).values.includes(value)));
  return { model: column.model.name, panel: now.name, messages: [...first, ...turns, { role: "user", content: prompt }], sampling, choices: known, fields };
}

async function answer(column, prompt, system, into, signal) {
  const view = new Answer(column.model.name);
  into.append(view.element);
  try {
    if (!panelOf(column.model)) throw new Error("This model has no such panel.");
    await stream(request(column, prompt, system), signal, (event) => {
      const atEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 60;
      view.take(event);
      if (atEnd) scrollTo(0, document.documentElement.scrollHeight);
    });
  } catch (error) {
    if (error.name !== "AbortError") view.fail(error instanceof TypeError ? "`redline play` does not answer." : error.message);
  }
  view.stopped();
  if (!view.failed) column.messages.push({ role: "user", content: prompt }, { role: "assistant", content: view.text });
}

async function send() {
  const prompt = get("prompt").value, system = get("system").value;
  if (running || (!prompt && panel().input !== "text")) return;
  const mine = (running = new AbortController());
  hide();
  get("send").disabled = true;
  get("stop").disabled = false;
  get("empty").hidden = true;
  const into = make("div", { className: columns.length > 1 ? "answers two" : "answers" });
  const shown = make("div", { className: "prompt", text: prompt });
  if (panel().input !== "chat") get("turns").replaceChildren();
  get("turns").append(make("li", {}, shown, into));
  if (panel().input === "chat") get("prompt").value = "";
  into.scrollIntoView({ block: "nearest" });
  await Promise.all(columns.map((column) => answer(column, prompt, system, into, mine.signal)));
  if (running === mine) running = null;
  get("send").disabled = false;
  get("stop").disabled = true;
  document.body.dataset.answered = String(1 + Number(document.body.dataset.answered || 0));
  lastPrompt = prompt;
}

// --- the command line that does the same

let lastPrompt = "";
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function command() {
  const now = panel(), system = get("system").value, { sampling, choices } = settings();
  const prompt = get("prompt").value || lastPrompt;
  const numbers = NUMBERS.filter((one) => one.name in sampling).flatMap((one) => [one.option, String(sampling[one.name])]);
  const name = chosen().typed, chats = now.input === "chat" && (system || columns[0].messages.length > 2);
  if (chats) return ["redline", "chat", name, ...(system ? ["--system", system] : []), ...numbers].map(quoted).join(" ");
  const set = now.choices.filter((one) => one.setting).flatMap((one) => ["--set", `${one.setting}=${choices[one.name]}`]);
  return ["redline", "sample", name, "--prompt", prompt, ...now.options, ...numbers, ...set].map(quoted).join(" ");
}

async function copy() {
  const text = command();
  get("command").textContent = text;
  get("command").hidden = false;
  try {
    await navigator.clipboard.writeText(text);
    get("link").textContent = "copied";
  } catch {  // not allowed here: the text can be selected
    getSelection().selectAllChildren(get("command"));
  }
}

// --- events

get("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
get("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
get("stop").addEventListener("click", () => running?.abort());
get("again").addEventListener("click", () => { restart(); get("prompt").focus(); });
get("copy").addEventListener("click", copy);
get("model").addEventListener("change", choosePanel);
get("beside").addEventListener("change", restart);
get("panels").addEventListener("change", fillForm);

async function begin() {
  try {
    const response = await fetch("/api/models", { credentials: "same-origin" });
    if (!response.ok) throw new Error((await response.text()).trim());
    models = (await response.json()).models;
  } catch (error) {
    get("link").textContent = error instanceof TypeError ? "`redline play` does not answer" : error.message;
    return;
  }
  const named = (model) => make("option", { value: model.name, text: model.name });
  get("model").replaceChildren(...models.map(named));
  get("beside").replaceChildren(make("option", { value: "", text: "nothing" }), ...models.map(named));
  if (models.length > 1) get("beside").value = models[1].name;
  get("beside").parentElement.hidden = models.length < 2;
  choosePanel();
  get("prompt").focus();
  document.body.dataset.drawn = "1";
}

begin();
