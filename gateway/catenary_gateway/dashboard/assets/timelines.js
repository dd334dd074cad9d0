// Live timelines: the book as it was booked and as it was really used.

import { bookingOf } from "./booking.js";
import { byId, h, keyed, text } from "./dom.js";
import { byName } from "./format.js";
import { colourOf } from "./palette.js";
import { TimelineCanvas } from "./timeline_canvas.js";

const KINDS = { gpu: 0, uplink: 1, downlink: 2 };
const SLOWEST_FRAME_MS = 250;

export class Timelines {
  constructor() {
    this.paused = false;
    this.agent = "";
    this.agents = new Map(); // server by agent
    this.names = "";
    this.seconds = 2;
    this.rows = [];
    this.base = 0;
    this.visible = false;
    this.frame = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.canvas = new TimelineCanvas(byId("timeline-canvas"), (said) => text(byId("booking"), said));
    this.waitMs = 50;
    this.drawnAt = 0;
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      this.loop();
    }).observe(byId("timelines"));
    document.addEventListener("visibilitychange", () => this.loop());
    byId("timeline-pause").addEventListener("click", () => this.pause(!this.paused));
    byId("timeline-agent").addEventListener("change", (event) => this.choose(event.target.value));
  }

  /** True while there is somebody to show new answers to. */
  get wanted() {
    return this.visible && !this.paused;
  }

  pause(paused) {
    this.paused = paused;
    byId("timeline-pause").setAttribute("aria-pressed", String(paused));
    text(byId("timeline-pause"), paused ? "Go on" : "Pause");
    this.pausedAt = performance.now();
    this.loop();
  }

  choose(agent) {
    this.agent = agent;
    byId("timeline-agent").value = agent;
    this.layOut();
  }

  /** Takes note of who there is, so that a row stays where it is while nothing is booked on it. */
  know(agents) {
    this.agents = new Map(agents.map((agent) => [agent.agent_id, agent.server_id]));
    const names = ["", ...[...this.agents.keys()].sort(byName)];
    keyed(byId("timeline-agent"), names, (name) => name, (name) => h("option", { value: name }), (option, name) => text(option, name || "all"));
    const changed = names.join() !== this.names;
    this.names = names.join();
    if (!names.includes(this.agent)) this.choose("");
    else if (changed) this.layOut();
  }

  show(answer, trueAt, seconds) {
    if (this.paused) return;
    const labels = answer.models.map((label) => ({ label, colour: Number(colourOf(label).slice(1)) }));
    this.answer = answer.resources.map((resource) => ({
      ...resource,
      bookings: resource.bookings.map((row) => bookingOf(row, labels)),
    }));
    this.base = trueAt;
    byId("timeline-truncated").hidden = !answer.truncated;
    this.seconds = seconds;
    keyed(
      byId("timeline-models"), labels, ({ label }) => label,
      ({ label }) => h("span", { class: `chip plain ${colourOf(label)}` }, h("span", { class: "swatch", "aria-hidden": "true" }), label),
      () => {},
    );
    this.layOut();
  }

  layOut() {
    const found = new Map((this.answer || []).map((resource) => [`${resource.kind} ${resource.owner}`, resource]));
    for (const agent of this.agents.keys()) {
      if (!found.has(`gpu ${agent}`)) found.set(`gpu ${agent}`, { kind: "gpu", owner: agent, bookings: [] });
    }
    const server = this.agents.get(this.agent);
    this.rows = [...found.values()]
      .filter(({ kind, owner }) => !this.agent || (kind === "gpu" ? owner === this.agent : owner === server || owner === this.agent))
      .sort((a, b) => (a.kind === "gpu" ? 0 : 1) - (b.kind === "gpu" ? 0 : 1) || byName(a.owner, b.owner) || KINDS[a.kind] - KINDS[b.kind]);
    this.canvas.layOut(this.rows);
    this.draw();
    this.loop();
  }

  loop() {
    cancelAnimationFrame(this.frame);
    if (!this.wanted || document.hidden || this.still.matches) return;
    this.frame = requestAnimationFrame((now) => {
      if (now - this.drawnAt >= this.waitMs) this.draw();
      this.loop();
    });
  }

  draw() {
    if (!this.visible) return;
    const started = performance.now();
    const now = this.paused ? this.pausedAt : started;
    // A picture runs on for a moment without news, then it stands: the future is not made up.
    const elapsedUs = Math.min(now - this.base, 2000 + 150 * this.seconds) * 1000;
    this.canvas.draw(this.rows, elapsedUs, this.seconds);
    this.drawnAt = started;
    // Drawing takes a tenth of the time at most, and what moves slowly is drawn less often.
    this.waitMs = Math.min(SLOWEST_FRAME_MS, Math.max(50, 8 * this.seconds, (performance.now() - started) * 10));
  }
}
