// Asks again and again, as long as somebody looks.

import { ask } from "./api.js";

const SLOWEST_MS = 5000;

/** One kind of answer, kept fresh. After a failure the last value stays, with its age. */
class Feed {
  constructor(kind, everyMs, query) {
    this.kind = kind;
    this.everyMs = everyMs;
    this.query = query || (() => ({}));
    this.value = null;
    this.problem = null;
    this.trueAt = 0; // performance.now() at which the value was true
    this.failures = 0;
    this.wanted = () => true;
    this.timer = 0;
    this.asking = 0;
  }

  /** Milliseconds since the value was true. */
  get ageMs() {
    return performance.now() - this.trueAt;
  }

  /** True if what is shown may not be what is. */
  get stale() {
    return this.value !== null && this.ageMs > 3 * this.everyMs + 1500;
  }
}

export class Feeds {
  constructor(onChange) {
    this.onChange = onChange;
    this.all = new Map();
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.pause();
      else this.start();
    });
    addEventListener("online", () => this.start());
  }

  add(kind, everyMs, query) {
    const feed = new Feed(kind, everyMs, query);
    this.all.set(kind, feed);
    return feed;
  }

  get(kind) {
    return this.all.get(kind);
  }

  start() {
    for (const feed of this.all.values()) this.again(feed, 0);
  }

  pause() {
    for (const feed of this.all.values()) clearTimeout(feed.timer);
  }

  /** Asks at once, e.g. because the question has changed. */
  now(kind) {
    this.again(this.all.get(kind), 0);
  }

  again(feed, waitMs) {
    clearTimeout(feed.timer);
    if (!document.hidden) feed.timer = setTimeout(() => this.ask(feed), waitMs);
  }

  async ask(feed) {
    if (!feed.wanted()) {
      this.again(feed, feed.everyMs);
      return;
    }
    const number = ++feed.asking;
    try {
      const { value, ageMs } = await ask(feed.kind, feed.query());
      if (number !== feed.asking) return;
      feed.value = value;
      feed.trueAt = performance.now() - ageMs;
      feed.problem = null;
      feed.failures = 0;
    } catch (problem) {
      if (number !== feed.asking) return;
      feed.problem = problem;
      feed.failures += 1;
    }
    // A key that is refused now is refused in a second too; whoever enters another one asks anew.
    const refused = feed.problem !== null && [401, 403].includes(feed.problem.status);
    const waitMs = Math.min(feed.everyMs * (1 + feed.failures / 2), Math.max(SLOWEST_MS, feed.everyMs));
    this.again(feed, refused ? SLOWEST_MS : waitMs);
    this.onChange(feed);
  }
}
