// A booking of the book: a stretch of time on a device or link.

import { duration } from "./format.js";

/**
 * A booking of an answer, by names; times are microseconds from now. What sessions computed was never
 * booked, what is yet to come is not real.
 */
export function bookingOf([batch, model, rows, bookedStart, bookedEnd, realStart, realEnd], labels) {
  return {
    batch, rows, bookedStart, bookedEnd, realStart, realEnd,
    model: labels[model].label, colour: labels[model].colour,
    booked: bookedStart !== 0 || bookedEnd !== 0,
    real: realStart !== 0 || realEnd !== 0,
    get start() {
      return this.booked ? bookedStart : realStart;
    },
  };
}

export function bookingWords(row, booking) {
  const kind = row.kind === "gpu" ? "device" : row.kind;
  if (!booking.booked) {
    return `${row.owner} ${kind}: ${booking.model}, sessions took ${duration((booking.realEnd - booking.realStart) * 1000)}, which nobody books.`;
  }
  const times = booking.real
    ? `, took ${duration((booking.realEnd - booking.realStart) * 1000)}, ${driftWords(booking.realEnd - booking.bookedEnd)}`
    : ", not reported yet";
  return (
    `${row.owner} ${kind}: ${booking.model}, batch ${booking.batch}, ${booking.rows} rows; ` +
    `booked for ${duration((booking.bookedEnd - booking.bookedStart) * 1000)}${times}.`
  );
}

function driftWords(driftUs) {
  if (Math.abs(driftUs) < 50) return "on time";
  return driftUs > 0 ? `${duration(driftUs * 1000)} late` : `${duration(-driftUs * 1000)} early`;
}
