// Where the time of one request went, bar by bar.

import { ask } from "./api.js";
import { facts, h } from "./dom.js";
import { duration } from "./format.js";
import { storyOf } from "./story.js";

const KIND_OF_STAGE = {
  receive: "gate", queue: "queue", send: "net", transfer: "net", wait: "queue", compute: "work",
  return: "net", merge: "gate", move: "move", stall: "stall", first_token: "token", next_tokens: "token",
};
const WORDS = {
  receive: "read", queue: "queue", send: "send", transfer: "transfer", wait: "wait", compute: "compute",
  return: "return", merge: "merge", move: "move to another chain", stall: "stall: no token",
  first_token: "until the first token", next_tokens: "all later tokens",
};

/** Returns elements that say where the time of a request went, and what happened to it if it generated text. */
export async function waterfallOf(requestId) {
  const { value } = await ask("trace", { request_id: requestId });
  if (!value.has_story) return body(value);
  return [...body(value), h("h3", null, "What happened"), await storyOf({ request_id: requestId })];
}

function body(trace) {
  const end = Math.max(1, trace.total_ns, ...trace.spans.map((span) => span.start_ns + span.duration_ns));
  const list = h("dl", { class: "facts" });
  const parts = new Set(trace.spans.map((span) => span.attempt).filter(Boolean)).size;
  const named = (stage) => trace.spans.filter((span) => stageOf(span) === stage);
  const stalls = named("stall");
  facts(list, [
    ["Model", trace.model],
    ["Outcome", trace.outcome, trace.outcome === "OK" ? null : "bad"],
    ["Took", duration(trace.total_ns)],
    ["Parts", parts || 1],
    ["Moves", named("move").length],
    ["Stalls", stalls.length ? duration(stalls.reduce((sum, span) => sum + span.duration_ns, 0)) : "none"],
    ["Trace", trace.trace_id || "–"],
  ]);
  const rows = h("ol", { class: "waterfall", "aria-label": "Stages in order" });
  let part = 0;
  for (const span of trace.spans) {
    if (parts > 1 && span.attempt && span.attempt !== part) {
      part = span.attempt;
      rows.append(h("li", { class: "part-head" }, `Part ${part}`));
    }
    rows.append(row(span, end));
  }
  return [list, axis(end), rows];
}

const stageOf = (span) => span.name.slice(span.name.lastIndexOf(".") + 1);

function row(span, end) {
  const stage = stageOf(span);
  const bar = h("span", { class: `bar-span ${KIND_OF_STAGE[stage] || "gate"}` });
  bar.style.left = `${(span.start_ns / end) * 100}%`;
  bar.style.width = `${(span.duration_ns / end) * 100}%`;
  return h(
    "li", null,
    h("span", { class: "stage" }, h("b", null, WORDS[stage] || stage), ` ${span.process}`),
    h("span", { class: "track", "aria-hidden": "true" }, bar),
    h("span", { class: "took" }, `${duration(span.duration_ns)}`, h("small", null, ` at ${duration(span.start_ns)}`)),
  );
}

function axis(end) {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", null, duration(end * share)));
  return h("div", { class: "axis", "aria-hidden": "true" }, h("span", { class: "marks" }, ...marks));
}
