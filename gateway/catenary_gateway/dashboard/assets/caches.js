// Key-value caches: what agents hold, and what chains may hold.

import { byId, meter } from "./dom.js";
import { byName, count, labelOf } from "./format.js";
import { named, table } from "./tables.js";

const HIGH = 0.95;

export class Caches {
  constructor() {
    this.agents = table(byId("agent-caches"), {
      label: "Caches of agents",
      keyOf: (agent) => agent.agent_id,
      empty: "No agent holds caches: no model generates text.",
      columns: [
        { name: "Agent", cell: (agent) => agent.agent_id },
        { name: "Block slots", make: bar((agent) => [agent.used_block_slots, agent.block_slots]) },
        { name: "Block tokens", make: bar((agent) => [agent.cached_block_tokens, agent.most_block_tokens]) },
      ],
    });
    this.chains = table(byId("chain-caches"), {
      label: "Caches of chains",
      keyOf: ({ chain }) => chain.chain_id,
      empty: "No chain serves a model that generates text.",
      columns: [
        { name: "Chain", make: makeChain },
        { name: "Sessions", make: bar(({ chain }) => [chain.sessions, chain.capacity]) },
        { name: "Tokens", make: bar(({ chain }) => [chain.cached_tokens, chain.cache_tokens]) },
      ],
    });
  }

  show(status) {
    this.agents(
      status.agents.filter((agent) => agent.block_slots > 0).sort((a, b) => byName(a.agent_id, b.agent_id)),
    );
    this.chains(
      status.models
        .flatMap((model) => model.chains.map((chain) => ({ chain, label: labelOf(model) })))
        .sort((a, b) => byName(a.chain.chain_id, b.chain.chain_id)),
    );
  }
}

function bar(figures) {
  return () => {
    const made = meter("");
    const show = made.show;
    made.show = (item) => {
      const [used, most] = figures(item);
      const share = most ? used / most : 0;
      show(share, most ? `${count(used)} of ${count(most)}` : count(used), share > HIGH ? "warn" : null);
    };
    return made;
  };
}

const makeChain = () => named(({ label }) => label, wordsOf, "span");

function wordsOf({ chain }) {
  const hops = chain.hops.map((hop) => `${hop.agent_id} [${hop.first_block},${hop.last_block})`).join(" → ");
  return `${chain.chain_id}: ${hops}`;
}
