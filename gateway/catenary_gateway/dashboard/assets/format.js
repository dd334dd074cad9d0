// Numbers for people.

/** Nanoseconds as us, ms or s with three digits. */
export function duration(ns) {
  if (ns < 1e6) return `${digits(ns / 1e3)} µs`;
  if (ns < 1e9) return `${digits(ns / 1e6)} ms`;
  return ns < 120e9 ? `${digits(ns / 1e9)} s` : `${digits(ns / 60e9)} min`;
}

export function ago(ns) {
  const seconds = ns / 1e9;
  if (seconds < 1) return "now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  return `${Math.round(seconds / 60)} min ago`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let value = count;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at ? digits(value) : value} ${units[at]}`;
}

/** Two figures of one unit: "3.20 of 24 GiB". */
export function ofBytes(used, most) {
  const [number, unit] = bytes(used).split(" ");
  const whole = bytes(most).replace(/\.0+ /, " ");
  return whole.endsWith(` ${unit}`) ? `${number} of ${whole}` : `${number} ${unit} of ${whole}`;
}

export const percent = (share) => `${digits(share * 100)} %`;

export const count = (value) => value.toLocaleString("en");

/** A rate, 0 without digits behind the point. */
export const rate = (perSecond) => `${digits(perSecond)}/s`;

/** Three digits, as many behind the point as that leaves. */
export function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95 || value === 0) return String(Math.round(value));
  return value.toFixed(size >= 9.995 ? 1 : 2);
}

const collator = new Intl.Collator("en", { numeric: true });

/** Orders agent-2 before agent-10. */
export const byName = (a, b) => collator.compare(a, b);

/** The label by which gateways know a model. */
export const labelOf = (model) => `${model.name}:${model.version}`;
