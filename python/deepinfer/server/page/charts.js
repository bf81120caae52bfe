// Live charts of the server's own metrics.
import { Scrape, Span } from "./metrics.js";

const EVERY = 2000;
const POINTS = 90;

const count = (x) => (x >= 100 ? Math.round(x).toLocaleString("en") : String(Math.round(x * 10) / 10));
const percent = (x) => `${(100 * x).toFixed(0)} %`;
const time = (x) => (x < 1 ? `${(1000 * x).toPrecision(3)} ms` : `${x.toPrecision(3)} s`);

// Each chart: a title, what its lines are called, their values of one span, how they are written, the least top of its scale.
const CHARTS = [
  ["Tokens per second", ["out", "in"], (s) => [s.rate("output_tokens_total"), s.rate("prefill_tokens_total")], count, 10],
  ["Requests", ["running", "waiting"], (s) => [s.now.sum("running"), s.now.sum("waiting")], count, 4],
  ["KV cache", ["used", "hits"], (s) => [s.now.most("kv_usage_ratio"), s.share("hit_tokens_total", "asked_tokens_total")], percent, 1],
  ["First token", ["p50", "p99"], (s) => quantiles(s, "time_to_first_token_seconds"), time, 0.01],
  ["Between tokens", ["p50", "p99"], (s) => quantiles(s, "inter_token_latency_seconds"), time, 0.01],
  ["Device", ["bubble", "host hidden"], (s) => [bubble(s), s.share("host_hidden_seconds_total", "step_host_seconds_sum")], percent, 1],
  ["Drafts accepted", ["of drafted"], (s) => [s.share("accepted_total", "drafted_total")], percent, 1],
];

const quantiles = (s, name) => [s.quantile(name, 0.5), s.quantile(name, 0.99)];

function bubble(s) {
  const idle = s.rise("bubble_seconds_total");
  const all = idle + s.rise("step_device_seconds_sum");
  return all > 0 ? idle / all : null;
}

const SVG = "http://www.w3.org/2000/svg";

class Chart {
  constructor([title, names, values, write, least]) {
    this.values = values;
    this.write = write;
    this.least = least;
    this.points = [];
    this.element = document.createElement("figure");
    this.element.className = "chart";
    this.element.dataset.chart = title;
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = title;
    const now = document.createElement("span");
    now.className = "values";
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", title);
    const ground = document.createElementNS(SVG, "line");
    for (const [key, value] of Object.entries({ x1: 0, x2: POINTS - 1, y1: 100, y2: 100 })) ground.setAttribute(key, value);
    svg.append(ground);
    this.lines = names.map((line, i) => {
      const kind = ["one", "two"][i];
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", kind);
      svg.append(path);
      const text = document.createElement("span");
      text.className = kind;
      now.append(text, i + 1 < names.length ? "  " : "");
      return { name: line, path, text };
    });
    this.scale = document.createElement("div");
    this.scale.className = "scale";
    this.scale.append(document.createElement("span"), document.createElement("span"));
    this.scale.firstChild.textContent = `${(EVERY * POINTS) / 1000} s`;
    caption.append(name, now);
    this.element.append(caption, svg, this.scale);
  }

  add(span) {
    this.points.push(this.values(span));
    if (this.points.length > POINTS) this.points.shift();
    const known = this.points.flat().filter((v) => v !== null);
    const top = Math.max(this.least, ...known);
    this.scale.lastChild.textContent = `top ${this.write(top)}`;
    const shift = POINTS - this.points.length;
    this.lines.forEach(({ name, path, text }, i) => {
      const last = this.points[this.points.length - 1][i];
      text.textContent = `${name} ${last === null ? "–" : this.write(last)}`;
      let drawn = "";
      let open = false;
      this.points.forEach((point, x) => {
        if (point[i] === null) return void (open = false);
        drawn += `${open ? "L" : "M"}${x + shift} ${(100 - (100 * point[i]) / top).toFixed(2)}`;
        if (!open) drawn += "h0.01"; // a point that stands alone is seen too
        open = true;
      });
      path.setAttribute("d", drawn);
    });
  }
}

export class Charts {
  constructor(container, settings, seen) {
    this.settings = settings;
    this.seen = seen;
    this.last = null;
    this.looking = false;
    this.charts = CHARTS.map((chart) => new Chart(chart));
    container.replaceChildren(...this.charts.map((chart) => chart.element));
  }

  start() {
    const tick = () => {
      if (!document.hidden) this.look();
    };
    tick();
    setInterval(tick, EVERY);
    document.addEventListener("visibilitychange", tick);
  }

  async look() {
    if (this.looking) return;
    this.looking = true;
    try {
      const answer = await fetch("metrics", { headers: { accept: "text/plain", ...this.settings.headers() }, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) return void this.seen({ up: null, error: "The metrics need an API key." });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const now = new Scrape(await answer.text(), performance.now());
      this.seen({ up: now.sum("engine_up") > 0, error: null });
      if (this.last !== null && now.at - this.last.at > 200) {
        const span = new Span(this.last, now);
        for (const chart of this.charts) chart.add(span);
      }
      this.last = now;
    } catch (error) {
      this.seen({ up: false, error: `No metrics: ${error.message}` });
    } finally {
      this.looking = false;
    }
  }
}
