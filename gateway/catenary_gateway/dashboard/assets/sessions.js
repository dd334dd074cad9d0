// Sessions that generate: where they are, how long, where they move; each opens its story.

import { byId } from "./dom.js";
import { byName, count } from "./format.js";
import { opener, table } from "./tables.js";

export class Sessions {
  constructor(onOpen) {
    this.table = table(byId("sessions-table"), {
      label: "Sessions",
      keyOf: (session) => session.session_id,
      empty: "No session generates text at the moment.",
      columns: [
        { name: "Session", make: () => opener(onOpen, (session) => session.session_id, (id) => `What happened to session ${id}`) },
        { name: "Request", cell: (session) => session.request_id || `at ${session.gateway_id}` },
        { name: "Model", cell: (session) => `${session.model}:${session.version}` },
        { name: "Chain", cell: (session) => session.chain_id || "of an earlier scheduler" },
        { name: "Agents", wide: true, cell: (session) => session.hops.map((hop) => `${hop.agent_id} [${hop.first_block},${hop.last_block})`).join(" → ") },
        { name: "Tokens", number: true, cell: (session) => count(session.tokens) },
        { name: "State", cell: stateOf },
      ],
    });
  }

  show(answer) {
    this.table([...answer.sessions].sort((a, b) => byName(a.session_id, b.session_id)));
  }
}

function stateOf(session) {
  if (session.moving_to) return `moves to ${session.moving_to} by ${session.moving_by}`;
  return session.generates ? "generates" : "reads its prompt";
}
