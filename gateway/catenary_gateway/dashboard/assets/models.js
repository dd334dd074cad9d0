// Models: readiness, queues, rates, latencies, and what became of the requests that arrived.

import { reasonWords } from "./depth.js";
import { byId, h, meter, s } from "./dom.js";
import { count, duration, labelOf, percent, rate } from "./format.js";
import { named, table } from "./tables.js";

const BUCKETS = 60;
const NOTHING = {
  arrived: 0, good: 0, late: 0, refused: 0, client: 0, attainment_ratio: -1,
  rows_per_s: 0, p50_ns: 0, p99_ns: 0, errors: {}, client_errors: {}, history: [],
};

export class Models {
  constructor() {
    this.show = this.show.bind(this);
    this.table = table(byId("models-table"), {
      label: "Models",
      keyOf: ({ model }) => labelOf(model),
      empty: "The scheduler serves no model yet.",
      columns: [
        { name: "Model", make: () => named(({ model }) => labelOf(model)) },
        { name: "State", make: makeState, wide: true },
        { name: "Queued", inside: true, number: true, cell: ({ model }) => count(model.queued_requests) },
        { name: "Served by", inside: true, cell: ({ model }) => servedBy(model) },
        { name: "Sessions", inside: true, number: true, cell: ({ model }) => (model.chains.length ? sessionsOf(model) : "–") },
        { name: "Rate", number: true, cell: ({ local }) => rate(local.rows_per_s) },
        { name: "p50", number: true, cell: ({ local }) => latency(local.p50_ns) },
        { name: "p99", number: true, cell: ({ local }) => latency(local.p99_ns) },
        { name: "Good, of all", make: makeAttainment },
        { name: "Last five minutes", make: makeHistory, wide: true },
      ],
    });
  }

  show(status, gateway) {
    const locals = gateway ? gateway.models : {};
    this.table(status.models.map((model) => ({ model, local: locals[labelOf(model)] || NOTHING })));
  }
}

const latency = (ns) => (ns ? duration(ns) : "–");

function servedBy(model) {
  const parts = [];
  const pipelines = model.pipelines_served.length || model.pipelines;
  if (pipelines) parts.push(`${pipelines} ${pipelines === 1 ? "pipeline" : "pipelines"}`);
  if (model.chains.length) parts.push(`${model.chains.length} ${model.chains.length === 1 ? "chain" : "chains"}`);
  return parts.join(", ") || "nothing";
}

function sessionsOf(model) {
  const capacity = model.chains.reduce((sum, chain) => sum + chain.capacity, 0);
  const moving = model.sessions_moving ? `, ${model.sessions_moving} moving` : "";
  return `${model.sessions} of ${capacity}${moving}`;
}

function makeState() {
  const element = h("span", { class: "tag" });
  element.show = ({ model, local }) => {
    // What clients did wrong themselves is told when asked for, and colours nothing.
    const errors = timesOf(local.errors);
    const theirs = timesOf(local.client_errors);
    const state = model.ready ? "ready" : `not ready: ${model.reason || "no reason given"}`;
    element.textContent = [state, ...errors].join("; ");
    element.title = theirs.length ? `clients' own mistakes: ${theirs.join("; ")}` : "";
    element.dataset.tone = model.ready ? (errors.length ? "warn" : "good") : "bad";
  };
  return element;
}

const timesOf = (reasons) => Object.entries(reasons).map(([reason, times]) => `${times} ${reasonWords(reason)}`);

/** The shares of what arrived that were not good, in words; empty if there are none. */
export function missesOf({ arrived, late, refused }) {
  const parts = [[late, "late"], [refused, "refused"]];
  return parts.filter(([times]) => times).map(([times, what]) => `${percent(times / arrived)} ${what}`);
}

function makeAttainment() {
  const bar = meter("");
  const show = bar.show;
  bar.show = ({ local }) => {
    const share = local.attainment_ratio;
    if (share < 0) show(0, "no requests");
    else {
      const words = [`${percent(share)} of ${count(local.arrived)}`, ...missesOf(local)].join(", ");
      show(share, words, share < 0.99 ? (share < 0.9 ? "bad" : "warn") : "good");
    }
  };
  return bar;
}

/** A bar of five seconds each: how many were good, late and refused. */
function makeHistory() {
  const drawing = s("svg", { class: "history", viewBox: `0 0 ${BUCKETS * 3} 24`, preserveAspectRatio: "none", role: "img" });
  let drawn = "";
  drawing.show = ({ local }) => {
    const signature = JSON.stringify(local.history);
    if (signature === drawn) return;
    drawn = signature;
    const most = Math.max(1, ...local.history.map(([, good, late, refused]) => good + late + refused));
    drawing.setAttribute("aria-label", `${local.arrived} requests: ${local.good} good, ${local.late} late, ${local.refused} refused`);
    drawing.replaceChildren(
      s("path", { class: "met", d: bars(local.history, most, ([, good]) => [0, good]) }),
      s("path", { class: "missed", d: bars(local.history, most, ([, good, late]) => [good, good + late]) }),
      s("path", { class: "refused", d: bars(local.history, most, ([, good, late, refused]) => [good + late, good + late + refused]) }),
    );
  };
  return drawing;
}

function bars(history, most, span) {
  return history
    .map((bucket) => {
      const x = (BUCKETS - 1 - bucket[0] / 5) * 3;
      const [low, high] = span(bucket).map((value) => 24 - (value / most) * 22);
      return high < low ? `M${x} ${low.toFixed(1)}V${high.toFixed(1)}h2.2V${low.toFixed(1)}z` : "";
    })
    .join("");
}
