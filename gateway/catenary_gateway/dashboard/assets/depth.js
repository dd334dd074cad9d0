// How deep the page goes: plain words for a visitor, or the inside of the cluster as well.
// Elements of the class "inside" are shown with the inside only.

import { store, stored } from "./api.js";
import { attribute, byId } from "./dom.js";

const STORED = "catenary-depth";
const PLAIN_WORDS = {
  OVERLOADED: "too busy",
  CACHE_FULL: "no memory left for a chat",
  SLO_UNATTAINABLE: "could not have been in time",
  UNAVAILABLE: "nobody there to serve it",
  NO_ACTIVE_PLAN: "not deployed",
  DEADLINE_EXCEEDED: "took too long",
  PARTITION_LOST: "a device was lost",
  DEVICE_LOST: "a device was lost",
  DEVICE_FAILED: "a device failed",
  DEVICE_OUT_OF_MEMORY: "a device was out of memory",
  COMPUTE_FAILED: "the model failed",
};

let inside = false;

/** True while the inside is shown. */
export const isInside = () => inside;

/** The reason of an error in plain words, or by its name. */
export const reasonWords = (reason) => (inside ? reason : PLAIN_WORDS[reason] || "an error");

export class Depth {
  constructor(onChange) {
    this.onChange = onChange;
    this.button = byId("depth");
    this.button.addEventListener("click", () => this.turn(!inside));
    addEventListener("hashchange", () => this.follow());
    inside = stored(STORED) === "inside";
    this.show();
    this.follow();
  }

  turn(wanted) {
    inside = wanted;
    store(STORED, inside && "inside");
    this.show();
    this.onChange();
  }

  show() {
    document.body.dataset.depth = inside ? "inside" : "plain";
    attribute(this.button, "aria-checked", String(inside));
  }

  /** A link to a section of the inside opens it. */
  follow() {
    const target = location.hash && byId(location.hash.slice(1));
    if (!target || !target.closest(".inside") || inside) return;
    this.turn(true);
    target.scrollIntoView();
  }
}
