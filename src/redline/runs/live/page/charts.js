// The curves, drawn by uPlot: one chart per measure, one colour and dash per run, one cursor for all charts.

const HEIGHT = 190;
export const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4]];

const count = (v) => {
  for (const [limit, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(v) >= limit) return `${+(v / limit).toPrecision(3)}${unit}`;
  }
  return `${+v.toPrecision(3)}`;
};
const percent = (v) => `${+(100 * v).toPrecision(3)} %`;
const small = (v) => (v === 0 ? "0" : Math.abs(v) < 1e-2 ? v.toExponential(1) : `${+v.toPrecision(3)}`);
const duration = (h) => {
  const s = 3600 * h, pad = (v) => String(Math.floor(v)).padStart(2, "0");
  if (s < 60) return `${+s.toPrecision(2)}s`;
  return s < 3600 ? `${Math.floor(s / 60)}m${pad(s % 60)}s` : `${Math.floor(h)}h${pad((s / 60) % 60)}m`;
};
const gib = (v) => {
  if (v === 0) return "0";
  if (v >= 1) return `${v.toFixed(1)} GiB`;
  return v >= 0.1 ? `${v.toFixed(2)} GiB` : `${(1024 * v).toFixed(1024 * v < 10 ? 1 : 0)} MiB`;
};
export const format = { count, percent, small, duration, gib };

// `lines`: levels of the plan to compare with; `zero`: the axis starts at zero; `whole`: ticks at whole numbers only;
// `held`: a strip at the bottom shows where the GPU was slowed.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
export const CHARTS = [
  { key: "loss", title: "Loss", points: true, show: (v) => v.toFixed(3), note: "line: training, dots: validation" },
  { key: "tokens_per_s", title: "Tokens per second", zero: true, show: count, lines: (plan) => plan.tokens_per_s },
  {
    key: "mfu", title: "MFU", zero: true, show: percent,
    // MFU is a share of the bf16 peak in every precision, so a ceiling for fp8 may be above 1.
    lines: (plan) => ({ "the plan": plan.mfu, [plan.mfu_ceiling > 1 ? "fp8's ceiling" : "the ceiling"]: plan.mfu_ceiling }),
  },
  { key: "step_ms", title: "Step time", zero: true, show: (v) => `${count(v)} ms` },
  { key: "data_wait", title: "Waiting for data", zero: true, show: percent, note: "share of a step" },
  { key: "grad_norm", title: "Gradient norm", zero: true, show: small },
  { key: "lr", title: "Learning rate", zero: true, show: small },
  { key: "gpu_util", title: "GPU utilisation", zero: true, top: 100, show: (v) => `${+v.toPrecision(3)} %` },
  { key: "power_w", title: "Power", zero: true, show: (v) => `${count(v)} W` },
  { key: "sm_clock_mhz", title: "GPU clock", whole: true, show: (v) => `${Math.round(v)} MHz`, held: true },
  { key: "temperature_c", title: "Temperature", whole: true, show: (v) => `${Math.round(v)} °C` },
  {
    key: "memory_gib", title: "Peak memory so far", zero: true, show: gib,
    lines: (plan, run) => (run.held_lines.all ? { "the plan": plan.memory_peak } : {}),
  },
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const runColour = (place) => colour(`--run-${place % 6}`);

export class Charts {
  constructor(parent) {
    this.parent = parent;
    this.made = new Map();
    this.axis = "step";
    this.logarithmic = false;
    // The first chart has the full width until a second one is added, so charts must follow the size of their box.
    this.sizes = new ResizeObserver(() => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  setAxis(axis, logarithmic) {
    [this.axis, this.logarithmic] = [axis, logarithmic];
    this.redraw();
  }

  redraw() {
    for (const chart of this.made.values()) chart.signature = "";
    if (this.runs) this.draw(this.runs);
  }

  resize() {
    for (const { plot, box } of this.made.values()) {
      if (plot && box.clientWidth && plot.width !== box.clientWidth) plot.setSize({ width: box.clientWidth, height: HEIGHT });
    }
  }

  // `runs`: [{name, place, steps, evals, plan, …}], the runs to show.
  draw(runs) {
    this.runs = runs;
    for (const kind of CHARTS) {
      const withData = runs.filter((run) => run.steps.has(kind.key) || (kind.points && run.evals.has("loss")));
      let chart = this.made.get(kind.key);
      if (!withData.length) {
        if (chart) chart.figure.hidden = true;
        continue;
      }
      if (!chart) this.made.set(kind.key, (chart = this.frame(kind)));
      chart.figure.hidden = false;
      this.fill(chart, kind, withData);
    }
  }

  frame(kind) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const title = document.createElement("b"), output = document.createElement("output"), box = document.createElement("div");
    figure.className = "card";
    figure.id = `chart-${kind.key}`;
    title.textContent = kind.title;
    caption.append(title, output);
    box.className = "plot";
    box.tabIndex = 0;
    box.setAttribute("role", "img");
    const lines = document.createElement("p");
    lines.className = "lines";
    figure.append(caption, box, lines);
    const next = CHARTS.slice(CHARTS.indexOf(kind) + 1).map((later) => this.made.get(later.key)).find(Boolean);
    this.parent.insertBefore(figure, next ? next.figure : null);
    const chart = { figure, box, output, lines, signature: "" };
    this.sizes.observe(box);
    box.addEventListener("keydown", (event) => this.key(chart, event));
    return chart;
  }

  fill(chart, kind, runs) {
    const tables = [], series = [], levels = [];
    for (const run of runs) {
      tables.push(run.steps.along(this.axis, kind.key, this.logarithmic));
      series.push({ run, points: false });
      if (kind.points && run.evals.has("loss")) {
        tables.push(run.evals.along(this.axis, "loss", this.logarithmic));
        series.push({ run, points: true });
      }
    }
    const only = runs[0];
    const named = runs.length === 1 && kind.lines ? kind.lines(only.plan, only) : {};
    for (const [name, value] of Object.entries(named)) if (value) levels.push({ name, value });
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    [chart.kind, chart.series, chart.levels, chart.runs] = [kind, series, levels, runs];
    const signature = JSON.stringify([this.axis, this.logarithmic, series.map((s) => [s.run.name, s.run.place, s.points])]);
    if (signature !== chart.signature || !chart.plot) {
      chart.plot?.destroy();
      chart.plot = new uPlot(this.options(chart), data, chart.box);
      chart.signature = signature;
    } else if (chart.zoomed) {
      const { min, max } = chart.plot.scales.x;
      chart.plot.setData(data, false);
      chart.plot.setScale("x", { min, max });
    } else {
      chart.plot.setData(data);
    }
    this.caption(chart);
  }

  options(chart) {
    const { kind } = chart, ink = colour("--faint"), grid = { stroke: colour("--grid"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const along = this.axis === "hours" ? duration : count;
    return {
      width: chart.box.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "redline" }, drag: { x: true, y: false }, points: { size: 6 }, y: false },
      scales: {
        x: { time: false, distr: this.logarithmic ? 3 : 1 },
        y: { range: (plot, low, high) => this.range(chart, low, high) },
      },
      axes: [
        { ...axis, size: 26, values: (_, ticks) => ticks.map((v) => (v === null ? "" : along(v))) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (v === null ? "" : kind.show(v))), space: 34, ...(kind.whole ? { incrs: WHOLE } : {}) },
      ],
      series: [{}, ...chart.series.map(({ run, points }) => ({
        stroke: runColour(run.place),
        width: points ? 0 : 1.5,
        dash: points ? [] : DASHES[run.place % DASHES.length],
        paths: points ? () => null : undefined,
        points: points ? { show: true, size: 7, fill: run.place % 2 ? colour("--card") : runColour(run.place), width: 1.5 }
          : { show: (plot, i) => plot.data[i].length < 3, size: 6 },
      }))],
      hooks: {
        drawAxes: [(plot) => this.levels(chart, plot)],
        draw: [(plot) => this.strip(chart, plot)],
        setCursor: [() => this.caption(chart)],
        setScale: [(plot, key) => { if (key === "x") chart.zoomed = this.isZoomed(plot); }],
      },
    };
  }

  isZoomed(plot) {
    const xs = plot.data[0], { min, max } = plot.scales.x;
    return xs.length > 1 && (min > xs[0] || max < xs[xs.length - 1]);
  }

  // A lone outlier, such as a step that compiles, would flatten the rest: it may lie outside the chart.
  range(chart, low, high) {
    const { kind, levels, plot } = chart;
    chart.highest = null;
    if (low === null || high === null) return [0, 1];
    if (kind.zero && plot && plot.data[0].length > 20) {
      const values = plot.data.slice(1).flat().filter((v) => v !== null && v !== undefined).sort((a, b) => a - b);
      const usual = values[Math.floor(0.95 * (values.length - 1))];
      if (usual > 0 && high > 3 * usual) [chart.highest, high] = [high, 1.5 * usual];
    }
    for (const { value } of levels) if (value < 4 * high) high = Math.max(high, 1.03 * value);
    if (kind.zero) return [0, Math.max(kind.top || 0, 1.1 * high) || 1];
    const margin = 0.07 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low - margin, high + margin];
  }

  // Draw the levels to compare with below the curves.
  levels(chart, plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    let above = -Infinity;
    ctx.save();
    ctx.font = `${10.5 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    ctx.strokeStyle = ctx.fillStyle = colour("--faint");
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    for (const { name, value } of [...chart.levels].sort((a, b) => b.value - a.value)) {
      const y = plot.valToPos(value, "y", true);
      if (y < bbox.top) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      if (y - above > 13 * ratio) ctx.fillText(name, bbox.left + bbox.width - 2 * ratio, (above = y) - ratio);
    }
    ctx.restore();
  }

  // Draw a strip at the bottom where the GPU was slowed, one row per run.
  strip(chart, plot) {
    if (!chart.kind.held) return;
    const { ctx, bbox } = plot, ratio = devicePixelRatio, inks = [null, colour("--warn"), colour("--accent")];
    ctx.save();
    chart.runs.forEach((run, row) => {
      const [xs, held] = run.steps.along(this.axis, "held_back", this.logarithmic);
      for (let i = 0; i < xs.length; i++) {
        if (!held[i]) continue;
        const from = plot.valToPos(xs[Math.max(0, i - 1)], "x", true), to = plot.valToPos(xs[i], "x", true);
        ctx.fillStyle = inks[held[i]];
        ctx.fillRect(from, bbox.top + bbox.height - (row + 1) * 5 * ratio, Math.max(ratio, to - from), 4 * ratio);
      }
    });
    ctx.restore();
  }

  caption(chart) {
    const { kind, plot } = chart;
    if (!plot) return;
    const place = plot.cursor.idx;
    const parts = [];
    chart.series.forEach(({ run, points }, i) => {
      const values = plot.data[i + 1];
      let value = place === null || place === undefined ? lastOf(values) : near(values, place);
      if (value === null) return;
      const name = chart.runs.length > 1 ? `${run.name} ` : "";
      parts.push(`${name}${points ? "val " : ""}${kind.show(value)}`);
    });
    const along = this.axis === "hours" ? duration : count;
    const at = place !== null && place !== undefined ? ` at ${along(plot.data[0][place])}` : "";
    set(chart.output, parts.join(" · ") + at);
    if (!at) chart.box.setAttribute("aria-label", `${kind.title}: ${parts.join(", ")}. Use the arrow keys to read values.`);
    const levels = chart.levels.map(({ name, value }) => `${name}: ${kind.show(value)}`);
    if (chart.highest) levels.push(`highest: ${kind.show(chart.highest)}`);
    set(chart.lines, [kind.note, ...levels, kind.held ? throttleText(chart.runs) : ""].filter(Boolean).join(" · "));
  }

  key(chart, event) {
    const { plot } = chart, xs = plot?.data[0];
    if (!xs?.length) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -50, PageUp: 50, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") {
      plot.setCursor({ left: -10, top: -10 });
    } else if (step !== undefined) {
      const now = plot.cursor.idx ?? (step < 0 ? xs.length : -1);
      const next = Math.max(0, Math.min(xs.length - 1, now + step));
      plot.setCursor({ left: plot.valToPos(xs[next], "x"), top: 10 });
      event.preventDefault();
    }
  }
}

function throttleText(runs) {
  const { all, power, heat } = runs[0].held_lines;
  if (runs.length > 1 || !all) return "";
  return `at its power limit in ${Math.round((100 * power) / all)} % of log lines, slowed by heat in ${Math.round((100 * heat) / all)} %`;
}

const lastOf = (values) => {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
};

// In a chart of several runs a row may have no value of this run: take the nearest one before.
const near = (values, place) => {
  for (let i = place; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
};

const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };
