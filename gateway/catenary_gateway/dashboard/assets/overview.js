// The head of the page: who leads, how fresh everything is, what is wrong, the figures at a glance.

import { attribute, byId, facts, text } from "./dom.js";
import { count, duration, percent } from "./format.js";

export function showLeader(status) {
  const leader = status.scheduler_id || "nobody";
  text(byId("leader"), `led by ${leader} · epoch ${status.epoch} · plan ${status.plan_id || "none"}`);
}

export function showTiles(feeds) {
  const feed = feeds.get("status");
  const status = feed.value;
  const gateway = feeds.get("requests").value && feeds.get("requests").value.gateway;
  const old = (feed.problem !== null || feed.stale) && "old";
  const gone = (feeds.get("requests").problem !== null || feeds.get("requests").stale) && "old";
  const tiles = [];
  if (gateway) {
    // Requests that were turned away before their model was known belong to none, and arrived all the same.
    const models = [gateway.unnamed, ...Object.values(gateway.models)];
    const sum = (what) => models.reduce((total, model) => total + model[what], 0);
    const [arrived, good] = [sum("arrived"), sum("good")];
    const share = arrived ? good / arrived : 1;
    const tone = gone || (share < 0.99 ? (share < 0.9 ? "bad" : "warn") : null);
    const part = (what) => (arrived ? percent(sum(what) / arrived) : "–");
    tiles.push(
      ["Good, 5 minutes", arrived ? `${part("good")} of ${count(arrived)}` : "–", tone],
      ["Late or failed", part("late"), gone],
      ["Refused", part("refused"), gone],
      ["Requests in flight", count(gateway.requests_in_flight), gone],
    );
  }
  if (status) {
    const ready = status.agents.filter((agent) => agent.state === "ready").length;
    tiles.push(
      ["Agents ready", `${ready} of ${status.agents.length}`, old || (ready < status.agents.length ? "warn" : null)],
      ["Requests queued", count(status.queued_requests), old],
      ["Batches in flight", count(status.batches_in_flight), old],
      ["Reservations", count(status.live_reservations), old],
      ["Sessions", count(status.sessions_in_flight), old],
      ["Redis", status.redis_connected ? "up" : "away", old || (status.redis_connected ? null : "bad")],
    );
  }
  facts(byId("tiles"), tiles);
}

const REFUSALS = [401, 403];

const known = (feed) =>
  feed.value === null ? "" : ` What is shown was true ${duration(Math.max(0, feed.ageMs) * 1e6)} ago.`;

/** Says what is wrong, and how old what is shown is. */
export function showHealth(feeds) {
  const status = feeds.get("status");
  const local = feeds.get("requests");
  let said = "";
  let state = "live";
  if (local.problem && local.problem.status === 0) {
    said = `The gateway does not answer.${known(local)}`;
    state = "away";
  } else if (local.problem) {
    said = `The gateway refuses: ${local.problem.message}`;
    state = "refused";
  } else if (status.problem) {
    said = `The scheduler is away: ${status.problem.message}.${known(status)} What this gateway knows itself is fresh.`;
    state = "stale";
  }
  const banner = byId("banner");
  if (said !== "") {
    // A screen reader hears it once, not each second: only the rest of the text changes.
    text(banner, said);
  }
  if (banner.hidden !== (said === "")) banner.hidden = said === "";
  attribute(byId("live"), "data-state", status.value === null && state === "live" ? "connecting" : state);
  text(byId("live-text"), liveWords(status, state));
}

function liveWords(status, state) {
  if (state === "away") return "no connection";
  if (state === "refused") return "refused";
  if (state === "stale") return "stale";
  return status.value === null ? "connecting" : "live";
}

/** Greys what is old, and says how old it is. */
export function showAges(feeds) {
  for (const section of document.querySelectorAll("section[data-feed]")) {
    const feed = feeds.get(section.dataset.feed);
    const problem = feed.problem !== null;
    const stale = feed.stale || (problem && feed.value === null);
    section.classList.toggle("stale", stale && feed.wanted());
    let words = "";
    if (problem && feed.value === null) words = REFUSALS.includes(feed.problem.status) ? "" : feed.problem.message;
    else if (stale && feed.wanted()) words = `as of ${duration(feed.ageMs * 1e6)} ago`;
    text(section.querySelector(".as-of"), words);
  }
}
