// The last hour of this gateway: rate, latency, refusals and tokens of each model.

import { attribute, byId, h, keyed, s, text } from "./dom.js";
import { count, digits, duration, percent } from "./format.js";
import { colourOf } from "./palette.js";
import { table } from "./tables.js";

const SHORT_S = 600;
const [WIDTH, HEIGHT] = [360, 100];
const UNNAMED = "before its model was known";
/** What one point of a line says; `null` where there is nothing to say. */
const CHARTS = [
  { id: "rate", name: "Requests a second", of: (point, bin) => point.arrived / bin.s, words: digits, unit: "/s" },
  { id: "p99", name: "99 % took at most", of: (point) => point.p99 || null, words: duration, unit: "" },
  { id: "refused", name: "Refused a minute", of: (point, bin) => (point.refused * 60) / bin.s, words: digits, unit: "/min" },
  { id: "tokens", name: "Tokens a second", of: (point, bin) => point.tokens / bin.s, words: digits, unit: "/s" },
];

export class Hour {
  constructor() {
    this.answer = null;
    this.at = null; // the point that is looked at, counted from the oldest
    this.box = byId("hour-charts");
    this.window = byId("hour-window");
    this.charts = CHARTS.map((chart) => new Chart(chart, this.box));
    this.table = table(byId("hour-table"), {
      label: "The time shown, by model",
      keyOf: ({ label }) => label,
      empty: "No request in this time.",
      columns: [
        { name: "Model", cell: ({ label }) => label || UNNAMED },
        { name: "Requests", number: true, cell: ({ sum }) => count(sum.arrived) },
        { name: "In time", number: true, cell: ({ sum }) => (sum.arrived ? percent(sum.good / sum.arrived) : "–") },
        { name: "Late or failed", number: true, cell: ({ sum }) => count(sum.late) },
        { name: "Refused", number: true, cell: ({ sum }) => count(sum.refused) },
        { name: "Longest p99", number: true, cell: ({ sum }) => (sum.p99 ? duration(sum.p99) : "–") },
        { name: "Tokens", number: true, cell: ({ sum }) => count(sum.tokens) },
      ],
    });
    this.chosen = false;
    this.window.addEventListener("change", () => {
      this.chosen = true;
      this.at = null;
      this.draw();
    });
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerdown", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.look(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  show(answer) {
    this.answer = answer;
    // A gateway that is young shows what it has, until somebody chooses.
    if (!this.chosen) this.window.value = answer.covered_s < 1.5 * SHORT_S ? "600" : "3600";
    this.draw();
  }

  draw() {
    if (!this.answer) return;
    const seconds = Number(this.window.value);
    const step = this.answer.step_s;
    const bin = { steps: seconds > SHORT_S ? 3 : 1 };
    bin.s = bin.steps * step;
    bin.count = seconds / bin.s;
    const known = Math.min(bin.count, Math.ceil(this.answer.covered_s / bin.s));
    this.bin = bin;
    this.lines = Object.entries(this.answer.models).map(([label, rows]) => ({ label, points: points(rows, bin) }));
    this.lines = this.lines.filter(({ points: each }) => each.some((point) => point.arrived || point.tokens));
    for (const chart of this.charts) chart.draw(this.lines, bin, bin.count - known, `${seconds / 60} min ago`);
    keyed(
      byId("hour-models"), this.lines, ({ label }) => label,
      ({ label }) => h("span", { class: `chip plain ${colourOf(label)}` }, h("span", { class: "swatch", "aria-hidden": "true" }), label || UNNAMED),
      () => {},
    );
    this.table(this.lines.map(({ label, points: each }) => ({ label, sum: sumOf(each) })));
    const covered = this.answer.covered_s;
    const since = covered < seconds ? ` It began ${duration(covered * 1e9)} ago; before that nothing is known.` : "";
    text(byId("hour-since"), `Counted by this gateway, ${this.answer.gateway_id}, for as long as it runs.${since}`);
    this.look(this.at);
  }

  point(event) {
    const chart = event.target.closest(".chart");
    if (!chart || !this.bin) return;
    const box = chart.querySelector("svg").getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    this.look(Math.min(this.bin.count - 1, Math.max(0, Math.floor(share * this.bin.count))));
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (steps === undefined || !this.bin) return;
    event.preventDefault();
    const last = this.bin.count - 1;
    this.look(Math.min(last, Math.max(0, (this.at === null ? last : this.at) + steps)));
  }

  /** Marks one moment in all charts, and says what was then. */
  look(at) {
    this.at = at;
    if (!this.bin) return;
    for (const chart of this.charts) chart.mark(at === null ? null : (at + 0.5) / this.bin.count);
    text(byId("hour-reading"), at === null ? "Point at a moment, or use the arrow keys." : this.reading(at));
  }

  reading(at) {
    const ago = (this.bin.count - 1 - at) * this.bin.s;
    const when = ago < 60 ? `${ago} s ago` : `${digits(ago / 60)} min ago`;
    const each = this.lines.map(({ label, points: all }) => {
      const point = all[at];
      const figures = [`${digits(point.arrived / this.bin.s)}/s`];
      if (point.p99) figures.push(`p99 ${duration(point.p99)}`);
      if (point.refused) figures.push(`${point.refused} refused`);
      if (point.tokens) figures.push(`${digits(point.tokens / this.bin.s)} tokens/s`);
      return point.arrived || point.tokens ? `${label || UNNAMED} ${figures.join(", ")}` : "";
    });
    return `${when}: ${each.filter(Boolean).join("; ") || "no request"}`;
  }
}

class Chart {
  constructor({ id, name, of, words, unit }, holder) {
    Object.assign(this, { of, words, unit, name });
    this.lines = s("g", null);
    this.unknown = s("rect", { class: "unknown", x: 0, y: 0, height: HEIGHT });
    this.cursor = s("path", { class: "cursor" });
    const grid = s("path", { class: "grid", d: `M0 1H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 1}H${WIDTH}` });
    this.drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.unknown, grid, this.lines, this.cursor);
    this.now = h("strong", null);
    this.top = h("span", { class: "top" });
    this.from = h("span", null);
    holder.append(
      h("figure", { class: "chart", id: `chart-${id}` }, h("figcaption", null, `${name} `, this.now), h("div", { class: "plot" }, this.drawing, this.top), h("p", { class: "when", "aria-hidden": "true" }, this.from, h("span", null, "now"))),
    );
  }

  draw(lines, bin, unknown, from) {
    text(this.from, from);
    const values = lines.map(({ label, points: each }) => ({ label, all: each.map((point) => this.of(point, bin)) }));
    const highest = Math.max(0, ...values.flatMap(({ all }) => all.filter((value) => value !== null)));
    const top = niceTop(highest);
    const width = WIDTH / bin.count;
    attribute(this.unknown, "width", unknown * width);
    keyed(
      this.lines, values, ({ label }) => label,
      ({ label }) => s("path", { class: `line ${colourOf(label)}` }),
      (path, { all }) => attribute(path, "d", lineOf(all, width, unknown, (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 6))),
    );
    const said = (value) => `${this.words(value)}${this.unit}`;
    text(this.top, highest ? said(top) : "");
    text(this.now, highest ? `up to ${said(highest)}` : "none");
    attribute(this.drawing, "aria-label", `${this.name}: ${values.map(({ label, all }) => `${label || UNNAMED} at most ${said(Math.max(0, ...all))}`).join("; ") || "no request"}`);
  }

  mark(share) {
    attribute(this.cursor, "d", share === null ? "M0 0" : `M${(share * WIDTH).toFixed(1)} 0V${HEIGHT}`);
  }
}

/** The rows of a model as points, oldest first; of several steps the worst p99 counts. */
function points(rows, bin) {
  const made = Array.from({ length: bin.count }, () => ({ arrived: 0, good: 0, late: 0, refused: 0, tokens: 0, p99: 0 }));
  for (const [age, good, late, refused, tokens, p99] of rows) {
    const point = made[bin.count - 1 - Math.floor(age / bin.steps)];
    if (point) add(point, { arrived: good + late + refused, good, late, refused, tokens, p99 });
  }
  return made;
}

function add(sum, point) {
  for (const what of ["arrived", "good", "late", "refused", "tokens"]) sum[what] += point[what];
  sum.p99 = Math.max(sum.p99, point.p99);
}

function sumOf(all) {
  const sum = { arrived: 0, good: 0, late: 0, refused: 0, tokens: 0, p99: 0 };
  for (const point of all) add(sum, point);
  return sum;
}

/** A line through all points there are; one that stands alone is a dot. */
function lineOf(all, width, first, yOf) {
  let path = "";
  let pen = false;
  all.forEach((value, at) => {
    if (value === null || at < first) {
      pen = false;
      return;
    }
    const place = `${((at + 0.5) * width).toFixed(1)} ${yOf(value).toFixed(1)}`;
    path += pen ? `L${place}` : `M${place}h.01`;
    pen = true;
  });
  return path || "M0 0";
}

/** The least of 1, 2, 5, 10, 20 ... that is not below a value. */
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999);
}
