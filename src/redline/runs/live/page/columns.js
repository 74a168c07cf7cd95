// What the page has of a run: columns that grow at their end, or are told anew.

export class Columns {
  constructor() { this.clear(); }

  clear() { this.x = {}; this.y = {}; this.rows = 0; this.buckets = 0; }

  // Rows from `told.from` on are replaced: the last bucket may have grown since.
  take(told) {
    const keep = Math.min(told.from, this.rows);
    for (const [name, values] of Object.entries(told.x)) this.x[name] = join(this.x[name], keep, values, told.rows);
    for (const name of new Set([...Object.keys(this.y), ...Object.keys(told.y)])) {
      this.y[name] = join(this.y[name], keep, told.y[name], told.rows);
    }
    this.rows = keep + told.rows;
    this.buckets = told.buckets;
  }

  // One field along an axis, without what has no place there.
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
  while (out.length < keep) out.push(null);  // a field that is told of for the first time
  for (let row = 0; row < rows; row++) out.push(values ? values[row] : null);
  return out;
}
