// Who leads, what was audited and mended, and what this gateway is doing.

import { byId, facts } from "./dom.js";
import { bytes, count } from "./format.js";
import { table } from "./tables.js";

export class Control {
  constructor() {
    this.groups = table(byId("groups"), {
      label: "Scheduler groups",
      keyOf: (group) => group.group,
      empty: "",
      columns: [
        { name: "Group", cell: (group) => group.group },
        { name: "Leader", cell: (group) => group.scheduler_id || "nobody" },
        { name: "Epoch", number: true, cell: (group) => group.epoch },
        { name: "Plan", cell: (group) => group.plan_id || "–" },
        { name: "Agents", number: true, cell: (group) => group.agents },
        { name: "Queued", number: true, cell: (group) => count(group.queued_requests) },
        { name: "Batches", number: true, cell: (group) => group.batches_in_flight },
        { name: "Sessions", number: true, cell: (group) => group.sessions_in_flight },
        { name: "Redis", cell: (group) => (group.redis_connected ? "connected" : "not connected") },
      ],
    });
  }

  showStatus(status) {
    facts(byId("control-facts"), [
      ["Leader", status.scheduler_id || "nobody"],
      ["Epoch", status.epoch],
      ["Redis", status.redis_connected ? "connected" : "not connected: the book lives in memory only", status.redis_connected ? null : "bad"],
      ["Gateways", status.gateways.join(", ") || "none"],
      ["Audits of the book", count(status.audits)],
      ["Leaks mended", count(status.leaks_mended), status.leaks_mended ? "warn" : null],
      ["Sessions moved", count(status.moves_done)],
      ["Moves that failed", count(status.moves_failed), status.moves_failed ? "warn" : null],
      ...versions(status),
    ]);
    byId("groups").hidden = status.groups.length === 0;
    this.groups(status.groups);
  }

  showGateway(gateway) {
    facts(byId("gateway-facts"), [
      ["Name", gateway.gateway_id],
      ["Ready", gateway.ready ? "yes" : `no: ${gateway.why_not_ready}`, gateway.ready ? null : "bad"],
      ["Version", gateway.version],
      ["Requests in flight", count(gateway.requests_in_flight)],
      ["Bytes held", bytes(gateway.in_flight_bytes)],
      ["Sessions here", `${gateway.sessions_running} run, ${gateway.sessions_waiting} wait`],
    ]);
  }
}

/** Said only where processes differ, as they do during an upgrade. */
function versions(status) {
  const each = status.versions || [];
  const different = new Set(each.map((process) => process.version)).size > 1;
  return different ? [["Versions", each.map((process) => `${process.name} ${process.version}`).join(", "), "warn"]] : [];
}
