// The plan in force: what it promises, what binds, and what is measured beside it.

import { byId, facts, text } from "./dom.js";
import { duration, rate } from "./format.js";
import { named, table } from "./tables.js";

export class Plan {
  constructor() {
    this.promises = table(byId("promises"), {
      label: "Promises of the plan",
      keyOf: ({ label }) => label,
      empty: "The plan in force came without promises.",
      columns: [
        { name: "Model", make: () => named(({ label }) => label) },
        { name: "Promised rate", number: true, cell: ({ promise }) => (promise.throughput_per_s ? rate(promise.throughput_per_s) : "–") },
        { name: "Rate now", number: true, cell: ({ local }) => (local ? rate(local.rows_per_s) : "–") },
        { name: "Promised latency", number: true, cell: ({ promise }) => promisedLatency(promise) },
        { name: "p99 now", number: true, cell: ({ local }) => (local && local.p99_ns ? duration(local.p99_ns) : "–") },
        { name: "Objective", number: true, cell: ({ promise }) => (promise.slo_ns ? duration(promise.slo_ns) : "–") },
        { name: "Sessions", number: true, cell: ({ promise, model }) => (promise.sessions ? `${model ? model.sessions : "–"} of ${promise.sessions}` : "–") },
        { name: "Survives", wide: true, cell: ({ promise }) => promise.survives || "–" },
        { name: "What binds", wide: true, cell: ({ promise }) => promise.binds || "nothing known" },
      ],
    });
  }

  show(plan, status, gateway) {
    facts(byId("plan-facts"), [
      ["Plan", plan.plan_id || "none"],
      ["Made by", plan.planner || "–"],
      ["Last switch", switchWords(plan.last_switch), tone(plan.last_switch)],
    ]);
    this.promises(
      plan.promises.map((promise) => {
        const label = `${promise.model}:${promise.version}`;
        const model = status && status.models.find((each) => each.name === promise.model && each.version === promise.version);
        return { promise, label, model, local: gateway ? gateway.models[label] : null };
      }),
    );
    text(byId("explanation"), plan.explanation || "No explanation was given.");
  }
}

function promisedLatency(promise) {
  if (promise.latency_ns) return `≤ ${duration(promise.latency_ns)}`;
  if (!promise.response_upper_ns) return "–";
  return `${duration(promise.response_lower_ns)} to ${duration(promise.response_upper_ns)} mean`;
}

function switchWords(change) {
  if (!change) return "none since this scheduler leads";
  const went = change.to_plan ? `${change.from_plan || "nothing"} → ${change.to_plan}` : `from ${change.from_plan}`;
  const paused = change.downtime.map((each) => `${each.model} not dispatched for ${duration(each.downtime_ns)}`);
  const parts = [`${change.phase}, ${duration(change.duration_ns)}`, went, change.cause, change.problem, ...paused];
  return parts.filter(Boolean).join("; ");
}

const tone = (change) => (change && change.phase === "rolled back" ? "bad" : null);
