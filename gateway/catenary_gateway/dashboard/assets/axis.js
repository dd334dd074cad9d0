// The axis of timelines, and words that fit their place.

/** How far ahead timelines show, in seconds. */
export const AHEAD_S = 1;

/** Marks of a time axis: {x, words}. */
export function ticks(seconds, { nowX, perUs }) {
  const step = seconds > 15 ? 5 : seconds > 6 ? 2 : seconds > 3 ? 1 : 0.5;
  const marks = [];
  for (let at = -Math.floor(seconds / step) * step; at <= AHEAD_S; at += step) {
    const words = at === 0 ? "now" : `${at > 0 ? "+" : "−"}${Math.abs(at)} s`;
    marks.push({ x: nowX + at * 1e6 * perUs, words });
  }
  return marks;
}

/** Writes what has room between `left` and `right`. */
export function writeTicks(context, marks, left, right) {
  context.textAlign = "center";
  for (const { x, words } of marks) {
    if (x > left && x < right) context.fillText(words, x, 9);
  }
  context.textAlign = "left";
}

const widths = new Map();

/** As much of a text as fits; measured once a text and width. */
export function fit(context, words, width) {
  const key = `${words} ${Math.round(width)}`;
  if (!widths.has(key)) {
    if (widths.size > 2000) widths.clear();
    let shown = words;
    while (shown.length > 1 && context.measureText(shown).width > width) shown = `${shown.slice(0, -2)}…`;
    widths.set(key, shown);
  }
  return widths.get(key);
}
