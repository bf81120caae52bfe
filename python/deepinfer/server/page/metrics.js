// Prometheus text, and what charts need of it: sums, rates, shares, quantiles.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export class Scrape {
  constructor(text, at) {
    this.at = at;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      if (!line.startsWith("deepinfer:")) continue;
      const found = LINE.exec(line);
      if (!found) continue;
      const [, name, labels = "", value] = found;
      if (!this.samples.has(name)) this.samples.set(name, new Map());
      this.samples.get(name).set(labels, value === "+Inf" ? Infinity : Number(value));
    }
  }

  series(name) {
    return this.samples.get(`deepinfer:${name}`) ?? new Map();
  }

  sum(name) {
    return [...this.series(name).values()].reduce((a, b) => a + b, 0);
  }

  most(name) {
    return Math.max(0, ...this.series(name).values());
  }
}

const grown = (now, before) => (now >= before ? now - before : now);

// Two scrapes of one server.
export class Span {
  constructor(before, now) {
    this.before = before;
    this.now = now;
    this.seconds = Math.max((now.at - before.at) / 1000, 1e-3);
  }

  // What counters grew by; one that fell belongs to a process that was started again.
  rise(name) {
    const before = this.before.series(name);
    let sum = 0;
    for (const [labels, value] of this.now.series(name)) sum += grown(value, before.get(labels) ?? 0);
    return sum;
  }

  rate(name) {
    return this.rise(name) / this.seconds;
  }

  // null where nothing happened: a gap in the line rather than a zero.
  share(part, whole) {
    const all = this.rise(whole);
    return all > 0 ? this.rise(part) / all : null;
  }

  quantile(name, q) {
    const before = this.before.series(`${name}_bucket`);
    const sums = new Map();
    for (const [labels, value] of this.now.series(`${name}_bucket`)) {
      const le = [...labels.matchAll(LABEL)].find((l) => l[1] === "le")[2];
      const bound = le === "+Inf" ? Infinity : Number(le);
      sums.set(bound, (sums.get(bound) ?? 0) + grown(value, before.get(labels) ?? 0));
    }
    const buckets = [...sums].sort((a, b) => a[0] - b[0]);
    const all = buckets.length ? buckets[buckets.length - 1][1] : 0;
    if (!all) return null;
    let low = 0;
    let below = 0;
    for (const [bound, count] of buckets) {
      if (count >= q * all && count > below) {
        return bound === Infinity ? low : low + ((bound - low) * (q * all - below)) / (count - below);
      }
      low = bound;
      below = count;
    }
    return low;
  }
}
