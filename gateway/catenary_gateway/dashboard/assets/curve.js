// The curve of a chain that hangs freely: y = a cosh((x - x0) / a) + c.

const STEPS = 28;

/**
 * Points of a chain that hangs between two points with the sag wanted; y grows downwards, as on a
 * screen. A chain between points (almost) above each other is a line.
 */
export function hang(from, to, sag) {
  const [left, right] = from.x <= to.x ? [from, to] : [to, from];
  const width = right.x - left.x;
  if (width < 6) return [from, to];
  const rise = left.y - right.y; // as if y grew upwards
  const distance = Math.hypot(width, rise);
  // A shallow chain is longer than its span by 8/3 sag^2/span, a deep one by twice its sag.
  const length = distance + Math.min((8 * sag * sag) / (3 * distance), 2 * sag);
  const a = width / 2 / solve(Math.sqrt(length * length - rise * rise) / width);
  const lowest = (left.x + right.x) / 2 - a * Math.atanh(rise / length);
  const base = -left.y - a * Math.cosh((left.x - lowest) / a);
  const points = [];
  for (let step = 0; step <= STEPS; step += 1) {
    const x = left.x + (width * step) / STEPS;
    points.push({ x, y: -(base + a * Math.cosh((x - lowest) / a)) });
  }
  return left === from ? points : points.reverse();
}

/** Solves sinh(u) / u = ratio for u > 0 by Newton's method; ratio > 1. */
function solve(ratio) {
  let u = ratio < 3 ? Math.sqrt(6 * (ratio - 1)) : Math.log(2 * ratio) + Math.log(Math.log(2 * ratio));
  for (let round = 0; round < 8; round += 1) {
    u -= (Math.sinh(u) - ratio * u) / (Math.cosh(u) - ratio);
  }
  return Math.max(u, 1e-3);
}

export function pathOf(points) {
  return points.map(({ x, y }, at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}
