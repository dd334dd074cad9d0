// The map: machines, the agents on them, and the chains that hang between these.

import { isInside } from "./depth.js";
import { attribute, byId, h, keyed, meter, text } from "./dom.js";
import { byName, bytes, digits, ofBytes, percent } from "./format.js";
import { colourOf } from "./palette.js";
import { Ropes, ropesOf } from "./ropes.js";

const STATES = { ready: "ready", joining: "joining", draining: "draining", lost: "lost" };

export class ClusterMap {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.agent = "";
    this.rope = "";
    this.status = null;
    this.ropes = new Ropes(byId("ropes"), byId("map"));
    new ResizeObserver(() => this.hang()).observe(byId("map"));
  }

  show(status) {
    this.status = status;
    const machines = new Map();
    for (const agent of [...status.agents].sort((a, b) => byName(a.agent_id, b.agent_id))) {
      const name = agent.server_id || "machine unknown";
      if (!machines.has(name)) machines.set(name, []);
      machines.get(name).push(agent);
    }
    const sorted = [...machines].sort(([a], [b]) => byName(a, b));
    keyed(byId("machines"), sorted, ([name]) => name, makeMachine, (element, [, agents]) => {
      attribute(element, "data-size", Math.min(agents.length, 4));
      keyed(
        element.lastElementChild, agents, (agent) => agent.agent_id,
        (agent) => this.makeAgent(agent.agent_id), (card, agent) => card.show(agent),
      );
    });
    this.showLegend(status);
    this.hang();
  }

  hang() {
    if (this.status === null) return;
    const served = ropesOf(this.status);
    byId("map").style.setProperty("--lanes", Math.min(8, served.length));
    this.ropes.draw(served, this.rope, this.agent);
    for (const card of byId("machines").querySelectorAll(".agent")) {
      const alone = this.rope && !served.some((rope) => rope.id === this.rope && rope.agents.has(card.agentId));
      card.classList.toggle("faded", Boolean(alone));
    }
  }

  showLegend(status) {
    const update = (chip, rope) => {
      text(chip.lastElementChild, rope.words);
      attribute(chip, "aria-pressed", String(this.rope === rope.id));
    };
    const make = (rope) =>
      h(
        "button", { type: "button", class: `chip ${colourOf(rope.model)}`, onclick: () => this.chooseRope(rope.id) },
        h("span", { class: "swatch", "aria-hidden": "true" }), h("span", null),
      );
    keyed(byId("legend"), ropesOf(status), (rope) => rope.id, make, update);
  }

  chooseRope(id) {
    this.rope = this.rope === id ? "" : id;
    this.agent = "";
    this.changed();
  }

  chooseAgent(id) {
    this.agent = this.agent === id ? "" : id;
    this.rope = "";
    this.changed();
  }

  changed() {
    this.show(this.status);
    this.onChoose(this.agent);
  }

  makeAgent(agentId) {
    const busy = meter("busy");
    const memory = meter("mem");
    const name = h("strong", null, agentId);
    const state = h("span", { class: "state" });
    const kind = h("span", { class: "kind" });
    const held = h("span", { class: "held" });
    const drift = h("span", { class: "drift" });
    const card = h(
      "button", { type: "button", class: "agent", onclick: () => this.chooseAgent(agentId) },
      h("span", { class: "agent-head" }, name, state), kind, busy, memory, drift, held,
    );
    card.agentId = agentId;
    card.show = (agent) => {
      text(state, STATES[agent.state] || agent.state);
      attribute(card, "data-state", agent.state);
      attribute(card, "aria-pressed", String(this.agent === agentId));
      text(kind, kindOf(agent));
      busy.show(agent.utilisation_ratio, percent(agent.utilisation_ratio));
      const used = agent.used_memory_bytes;
      const share = agent.memory_bytes ? used / agent.memory_bytes : 0;
      memory.show(share, used ? ofBytes(used, agent.memory_bytes) : bytes(agent.memory_bytes), share > 0.95 ? "bad" : null);
      const slow = agent.slowdown_ratio;
      const queued = agent.batches ? `${agent.batches} ${agent.batches === 1 ? "batch" : "batches"}` : "";
      const against = agent.impairments.map((each) => each.kind.replace("_", " ")).join(", ");
      const coming = (agent.fetches || []).map(fetching);
      const late = isInside() ? slow && `${digits(slow)}× booked time` : slow > 1.25 && "slower than planned";
      const figures = [...coming, late, isInside() && queued, against];
      text(drift, figures.filter(Boolean).join(" · "));
      attribute(drift, "data-tone", slow > 1.25 || against ? "bad" : null);
      attribute(drift, "title", agent.impairments.map((each) => each.why).join("; ") || null);
      keyed(held, agent.partitions, (part) => part, makePartition, () => {});
    };
    return card;
  }
}

/** "fetches net: 12 MB of 90 MB, 25 MB/s". */
function fetching(fetch) {
  const done = ofBytes(fetch.fetched_bytes, fetch.wanted_bytes);
  return `fetches ${fetch.model}: ${done}, ${bytes(fetch.bytes_per_second)}/s`;
}

function makeMachine([name]) {
  return h("div", { class: "machine" }, h("h3", null, name), h("div", { class: "agents" }));
}

function kindOf(agent) {
  const kind = agent.device_class || agent.device;
  return agent.virtual_level > 1 ? `${kind}, 1/${agent.virtual_level} of ${agent.device_id || "a device"}` : kind;
}

/** "net:1[0,4)" as a chip in the model's colour. */
function makePartition(part) {
  const cut = part.lastIndexOf("[");
  const model = cut > 0 ? part.slice(0, cut) : part;
  return h(
    "span", { class: `part ${colourOf(model)}`, title: part },
    h("span", { class: "swatch", "aria-hidden": "true" }),
    `${model.split(":")[0]} ${cut > 0 ? part.slice(cut) : ""}`,
  );
}
