// Puts the page together: feeds ask, views show.

import { Caches } from "./caches.js";
import { Control } from "./control.js";
import { Depth, isInside } from "./depth.js";
import { Details } from "./details.js";
import { DevicePanel } from "./device.js";
import { byId } from "./dom.js";
import { Feeds } from "./feeds.js";
import { labelOf } from "./format.js";
import { Hour } from "./hour.js";
import { KeyDialog } from "./key.js";
import { ClusterMap } from "./map.js";
import { Models } from "./models.js";
import { Orders } from "./orders.js";
import { showAges, showHealth, showLeader, showSummary, showTiles } from "./overview.js";
import { nameColours } from "./palette.js";
import { Plan } from "./plan.js";
import { Requests } from "./requests.js";
import { Sessions } from "./sessions.js";
import { storyOf } from "./story.js";
import { Timelines } from "./timelines.js";
import { Trying } from "./trying.js";
import { waterfallOf } from "./waterfall.js";

const timelines = new Timelines();
const models = new Models();
const caches = new Caches();
const plan = new Plan();
const details = new Details();
const openRequest = (id) => details.open(`Request ${id}`, () => waterfallOf(id));
const requests = new Requests(openRequest);
const sessions = new Sessions((id) => details.open(`Session ${id}`, async () => [await storyOf({ session_id: id })]));
const control = new Control();
const hour = new Hour();
const trying = new Trying(openRequest);
const orders = new Orders(() => showDevice());
const device = new DevicePanel(orders, () => map.chooseAgent(map.agent));
const map = new ClusterMap((agent) => {
  timelines.choose(agent);
  showDevice();
});

const feeds = new Feeds(changed);
const status = feeds.add("status", 1000);
const local = feeds.add("requests", 1000);
const timeline = feeds.add("timelines", 1000, () => ({ seconds: byId("timeline-window").value }));
const sessionList = feeds.add("sessions", 2000);
const planFeed = feeds.add("plan", 3000);
const offers = feeds.add("models", 5000);
const lastHour = feeds.add("history", 10000);
timeline.wanted = () => isInside() && timelines.wanted && status.value !== null;
sessionList.wanted = isInside;
planFeed.wanted = isInside;

const key = new KeyDialog(() => feeds.start());
const gateway = () => (local.value ? local.value.gateway : null);

const views = {
  status() {
    nameColours(status.value.models.map(labelOf));
    showLeader(status.value);
    map.show(status.value);
    showDevice();
    orders.know(status.value);
    timelines.know(status.value.agents);
    models.show(status.value, gateway());
    caches.show(status.value);
    control.showStatus(status.value);
  },
  requests() {
    requests.show(local.value.requests);
    control.showGateway(gateway());
    if (status.value) models.show(status.value, gateway());
  },
  timelines() {
    timelines.show(timeline.value, timeline.trueAt, Number(byId("timeline-window").value));
  },
  sessions() {
    sessions.show(sessionList.value);
  },
  models() {
    trying.show(offers.value);
  },
  history: showHour,
  plan() {
    plan.show(planFeed.value, status.value, gateway());
  },
};

function changed(feed) {
  if (feed.problem === null) {
    views[feed.kind]();
  } else if (feed.problem.status === 401) {
    key.ask(feed.problem.message);
  }
  if (feed === status && !hour.answer) showHour();
  showState();
}

/** Models have the colours of their names' order, so the names come first if they come at all. */
function showHour() {
  if (lastHour.value && (status.value || status.problem)) hour.show(lastHour.value);
}

function showDevice() {
  if (status.value) device.show(status.value, map.agent);
}

function showState() {
  showSummary(feeds);
  showTiles(feeds);
  showHealth(feeds);
  showAges(feeds);
}

byId("timeline-window").addEventListener("change", (event) => {
  // The further back, the slower everything moves, and the more there is to send.
  timeline.everyMs = Math.max(1000, Number(event.target.value) * 100);
  feeds.now("timelines");
});
new Depth(() => {
  for (const feed of feeds.all.values()) {
    if (feed.value !== null && feed.problem === null) views[feed.kind]();
  }
  showState();
  feeds.start();
});
setInterval(() => {
  if (!document.hidden) showState();
}, 1000);
feeds.start();
