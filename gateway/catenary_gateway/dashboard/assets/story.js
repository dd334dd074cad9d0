// What happened to a request and its sessions, and why: every change of state with what caused it.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { duration } from "./format.js";
import { table } from "./tables.js";

/** Asks for the story of a session or request, and returns an element that tells it, or why not. */
export async function storyOf(query) {
  const holder = h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "What happened" });
  const show = table(holder, {
    label: "What happened",
    keyOf: (change) => change.at,
    empty: "Nothing is known of it.",
    columns: [
      { name: "Ago", cell: (change) => duration(change.ago_ns) },
      { name: "Who", cell: (change) => (change.session_id === "0" ? "request" : change.session_id) },
      { name: "State", cell: (change) => change.after },
      { name: "What", cell: (change) => change.name },
      { name: "Why", wide: true, cell: (change) => change.why || "–" },
      { name: "Event", cell: (change) => `${change.event_kind} ${change.event}${change.answers ? ` on ${change.answers}` : ""}` },
    ],
  });
  try {
    const { value } = await ask("story", query);
    show(value.changes.map((change, at) => ({ ...change, at })));
  } catch (problem) {
    return h("p", { class: "empty", role: "alert" }, problem.message);
  }
  return holder;
}
