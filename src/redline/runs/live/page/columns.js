// The rows of a run's curves, by column. They grow at the end; the last ones may be replaced.

export class Columns {
  constructor() { this.clear(); }

  clear() { this.x = {}; this.y = {}; this.rows = 0; this.buckets = 0; }

  // Replace the rows from `update.from` on: the server's last bucket may have grown since the last answer.
  replaceFrom(update) {
    const keep = Math.min(update.from, this.rows);
    for (const [name, values] of Object.entries(update.x)) this.x[name] = join(this.x[name], keep, values, update.rows);
    for (const name of new Set([...Object.keys(this.y), ...Object.keys(update.y)])) {
      this.y[name] = join(this.y[name], keep, update.y[name], update.rows);
    }
    this.rows = keep + update.rows;
    this.buckets = update.buckets;
  }

  // One field along an axis, without rows that have no value on that axis.
  along(axis, name, logarithmic) {
    const xs = this.x[axis] || [], ys = this.y[name] || [], outX = [], outY = [];
    for (let row = 0; row < xs.length; row++) {
      const x = xs[row];
      if (x === null || (logarithmic && x <= 0) || (outX.length && x < outX[outX.length - 1])) continue;
      outX.push(x);
      outY.push(row < ys.length ? ys[row] : null);
    }
    return [outX, outY];
  }

  has(name) { return (this.y[name] || []).some((value) => value !== null); }

  last(name) {
    const values = this.y[name] || [];
    for (let row = values.length - 1; row >= 0; row--) if (values[row] !== null) return values[row];
    return null;
  }
}

function join(known, keep, values, rows) {
  const out = (known || []).slice(0, keep);
  while (out.length < keep) out.push(null);  // the field is new
  for (let row = 0; row < rows; row++) out.push(values ? values[row] : null);
  return out;
}
