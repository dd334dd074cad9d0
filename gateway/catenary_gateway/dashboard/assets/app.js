// Puts the page together: feeds ask, views show.

import { Caches } from "./caches.js";
import { Control } from "./control.js";
import { Details } from "./details.js";
import { byId } from "./dom.js";
import { Feeds } from "./feeds.js";
import { labelOf } from "./format.js";
import { KeyDialog } from "./key.js";
import { ClusterMap } from "./map.js";
import { Models } from "./models.js";
import { showAges, showHealth, showLeader, showTiles } from "./overview.js";
import { nameColours } from "./palette.js";
import { Plan } from "./plan.js";
import { Requests } from "./requests.js";
import { Sessions } from "./sessions.js";
import { storyOf } from "./story.js";
import { Timelines } from "./timelines.js";
import { waterfallOf } from "./waterfall.js";

const timelines = new Timelines();
const map = new ClusterMap((agent) => timelines.choose(agent));
const models = new Models();
const caches = new Caches();
const plan = new Plan();
const details = new Details();
const requests = new Requests((id) => details.open(`Request ${id}`, () => waterfallOf(id)));
const sessions = new Sessions((id) => details.open(`Session ${id}`, async () => [await storyOf({ session_id: id })]));
const control = new Control();

const feeds = new Feeds(changed);
const status = feeds.add("status", 1000);
const local = feeds.add("requests", 1000);
const timeline = feeds.add("timelines", 1000, () => ({ seconds: byId("timeline-window").value }));
const sessionList = feeds.add("sessions", 2000);
const planFeed = feeds.add("plan", 3000);
timeline.wanted = () => timelines.wanted && status.value !== null;

const key = new KeyDialog(() => feeds.start());
const gateway = () => (local.value ? local.value.gateway : null);

const views = {
  status() {
    nameColours(status.value.models.map(labelOf));
    showLeader(status.value);
    map.show(status.value);
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
  showState();
}

function showState() {
  showTiles(feeds);
  showHealth(feeds);
  showAges(feeds);
}

byId("timeline-window").addEventListener("change", (event) => {
  // The further back, the slower everything moves, and the more there is to send.
  timeline.everyMs = Math.max(1000, Number(event.target.value) * 100);
  feeds.now("timelines");
});
setInterval(() => {
  if (!document.hidden) showState();
}, 1000);
feeds.start();
