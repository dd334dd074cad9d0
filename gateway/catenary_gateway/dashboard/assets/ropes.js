// What hangs between agents: chains of models that generate text, pipelines of pools.

import { hang, pathOf } from "./curve.js";
import { s } from "./dom.js";
import { labelOf } from "./format.js";
import { colourOf } from "./palette.js";

const LANE = 13;
const DEEPEST_LANES = 8;

/**
 * Everything that hangs: {id, model, words, load, dashed, links, agents}; a link is a pair of agents.
 */
export function ropesOf(status) {
  return status.models.flatMap((model) => [
    ...model.chains.map((chain) => chainRope(labelOf(model), chain)),
    ...model.pipelines_served.map((pipeline, at) => pipelineRope(labelOf(model), pipeline, at)),
  ]);
}

function chainRope(model, chain) {
  const agents = chain.hops.map((hop) => hop.agent_id);
  const role = chain.role && chain.role !== "mixed" ? `, ${chain.role}` : "";
  return {
    id: `chain ${chain.chain_id}`,
    model,
    words: `${chain.chain_id}${role}: ${chain.sessions} of ${chain.capacity} sessions`,
    load: chain.capacity ? chain.sessions / chain.capacity : 0,
    dashed: role !== "",
    links: agents.slice(1).map((agent, at) => [agents[at], agent]),
    agents: new Set(agents),
  };
}

function pipelineRope(model, pipeline, at) {
  const pools = pipeline.stages.map((stage) => stage.agent_ids);
  const agents = new Set(pools.flat());
  const count = pools.length === 1 ? "1 pool" : `${pools.length} pools`;
  return {
    id: `pipeline ${model} ${at}`,
    model,
    words: `${model} pipeline ${at + 1}: ${count} of ${pools.map((pool) => pool.length).join(" + ")} agents, batches of ${pipeline.batch}`,
    load: 0,
    dashed: false,
    links: pools.slice(1).flatMap((pool, stage) => between(pools[stage], pool)),
    agents,
  };
}

/** Any agent of one pool sends to any of the next; each is drawn once, so that one sees who is in. */
function between(from, to) {
  const most = Math.max(from.length, to.length);
  return Array.from({ length: most }, (_, at) => [
    from[Math.floor((at * from.length) / most)],
    to[Math.floor((at * to.length) / most)],
  ]);
}

export class Ropes {
  constructor(svg, holder) {
    this.svg = svg;
    this.holder = holder;
    this.drawn = "";
  }

  /** Draws what changed since the last time, or nothing. */
  draw(ropes, chosenRope, chosenAgent) {
    const frame = this.holder.getBoundingClientRect();
    const spots = new Map();
    for (const card of this.holder.querySelectorAll(".agent")) {
      const box = card.getBoundingClientRect();
      spots.set(card.agentId, {
        left: box.left - frame.left, width: box.width, bottom: box.bottom - frame.top, top: box.top - frame.top,
      });
    }
    const signature = JSON.stringify([
      frame.width, frame.height, [...spots], chosenRope, chosenAgent,
      ropes.map((rope) => [rope.id, rope.load, rope.links]),
    ]);
    if (signature === this.drawn) return;
    this.drawn = signature;
    this.svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const shown = (rope) =>
      (!chosenRope || rope.id === chosenRope) && (!chosenAgent || rope.agents.has(chosenAgent));
    // What is chosen is drawn last, above all else.
    const order = ropes.map((rope, lane) => ({ rope, lane })).sort((a, b) => shown(a.rope) - shown(b.rope));
    this.svg.replaceChildren(
      ...order.map(({ rope, lane }) => this.one(rope, lane, spots, ropes.length, shown(rope))),
    );
  }

  one(rope, lane, spots, count, shown) {
    const sides = pins(lane, count);
    const group = s("g", { class: `rope-group ${colourOf(rope.model)}${shown ? "" : " faded"}` });
    const depth = 24 + (lane % DEEPEST_LANES) * LANE;
    const pinned = new Set();
    for (const [from, to] of rope.links) {
      const [a, b] = [spots.get(from), spots.get(to)];
      if (!a || !b) continue;
      const start = { x: a.left + a.width * sides, y: a.bottom };
      // To an agent in a lower row the chain runs down to its upper edge.
      const below = b.top > a.bottom;
      const above = b.bottom < a.top;
      const end = { x: b.left + b.width * sides, y: below ? b.top : b.bottom };
      if (above) start.y = a.top;
      const path = pathOf(hang(start, end, depth));
      group.append(s("path", { class: rope.dashed ? "rope dashed" : "rope", d: path }));
      if (rope.load > 0) {
        const share = Math.min(1, rope.load) * 100;
        group.append(s("path", { class: "load", d: path, pathLength: 100, "stroke-dasharray": `${share} 100` }));
      }
      for (const point of [start, end]) pinned.add(`${point.x.toFixed(1)} ${point.y.toFixed(1)}`);
    }
    for (const agent of rope.agents) {
      const spot = spots.get(agent);
      if (spot && rope.links.length === 0) {
        const x = spot.left + spot.width * sides;
        group.append(s("path", { class: "rope", d: `M${x} ${spot.bottom}v${depth / 2}` }));
        group.append(s("circle", { class: rope.load > 0 ? "bead full" : "bead", cx: x, cy: spot.bottom + depth / 2, r: 4.5 }));
        pinned.add(`${x.toFixed(1)} ${spot.bottom.toFixed(1)}`);
      }
    }
    for (const pin of pinned) {
      const [x, y] = pin.split(" ");
      group.append(s("circle", { class: "pin", cx: x, cy: y, r: 3 }));
    }
    return group;
  }
}

/** Where along a card's edge the pins of a rope are: apart from those of other ropes. */
function pins(lane, count) {
  const places = Math.min(count, DEEPEST_LANES);
  return 0.5 + ((lane % DEEPEST_LANES) - (places - 1) / 2) * (0.7 / Math.max(places, 4));
}

