// The head of the page: who leads, how fresh everything is, what is wrong, the figures at a glance.

import { isInside } from "./depth.js";
import { attribute, byId, facts, text } from "./dom.js";
import { count, duration, percent } from "./format.js";

export function showLeader(status) {
  const leader = status.scheduler_id || "nobody";
  text(byId("leader"), `led by ${leader} · epoch ${status.epoch} · plan ${status.plan_id || "none"}`);
}

/** What became of all requests of the last minutes, those refused before their model was known among them. */
function sumOf(gateway) {
  const models = [gateway.unnamed, ...Object.values(gateway.models)];
  const sum = (what) => models.reduce((total, model) => total + model[what], 0);
  const arrived = sum("arrived");
  const part = (what) => (arrived ? percent(sum(what) / arrived) : "–");
  return { arrived, part, share: arrived ? sum("good") / arrived : 1 };
}

const localOf = (feeds) => feeds.get("requests").value && feeds.get("requests").value.gateway;
const readyOf = (agents) => agents.filter((agent) => agent.state === "ready").length;

/** The state of everything in two sentences, for whoever does not know the words of the inside. */
export function showSummary(feeds) {
  const status = feeds.get("status").value;
  const gateway = localOf(feeds);
  if (!status || !gateway) return;
  const ready = readyOf(status.agents);
  const served = status.models.filter((model) => model.ready).length;
  const devices = status.agents.length;
  const working = ready === devices ? `${devices} ${devices === 1 ? "device works" : "devices work"}` : `${ready} of ${devices} devices work`;
  const asked = served === status.models.length ? `${served} ${served === 1 ? "model" : "models"}` : `${served} of ${status.models.length} models`;
  const { arrived, part } = sumOf(gateway);
  const lately = arrived
    ? `In the last five minutes ${count(arrived)} ${arrived === 1 ? "request" : "requests"} came in, and ${part("good")} were answered in time.`
    : "Nobody has asked anything in the last five minutes.";
  text(byId("summary-now"), `${working}, and ${asked} can be asked. ${lately}`);
}

export function showTiles(feeds) {
  const feed = feeds.get("status");
  const status = feed.value;
  const gateway = localOf(feeds);
  const old = (feed.problem !== null || feed.stale) && "old";
  const gone = (feeds.get("requests").problem !== null || feeds.get("requests").stale) && "old";
  const inside = isInside();
  const tiles = [];
  if (gateway) {
    const { arrived, part, share } = sumOf(gateway);
    const tone = gone || (share < 0.99 ? (share < 0.9 ? "bad" : "warn") : null);
    tiles.push(
      inside ? ["Good, 5 minutes", arrived ? `${part("good")} of ${count(arrived)}` : "–", tone] : ["Answered in time", part("good"), tone],
      ["Late or failed", part("late"), gone],
      ["Refused", part("refused"), gone],
      [inside ? "Requests in flight" : "Being answered", count(gateway.requests_in_flight), gone],
    );
  }
  if (status) {
    const ready = readyOf(status.agents);
    const tone = old || (ready < status.agents.length ? "warn" : null);
    tiles.push([inside ? "Agents ready" : "Devices at work", `${ready} of ${status.agents.length}`, tone]);
    if (inside) {
      tiles.push(
        ["Requests queued", count(status.queued_requests), old],
        ["Batches in flight", count(status.batches_in_flight), old],
        ["Reservations", count(status.live_reservations), old],
        ["Sessions", count(status.sessions_in_flight), old],
        ["Redis", status.redis_connected ? "up" : "away", old || (status.redis_connected ? null : "bad")],
      );
    } else tiles.push(["Answers being written", count(status.sessions_in_flight), old]);
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
