// Draws timelines, and finds what a pointer or a key points at.

import { AHEAD_S, fit, ticks, writeTicks } from "./axis.js";
import { bookingWords } from "./booking.js";
import { duration } from "./format.js";
import { canvasColours } from "./palette.js";

const AXIS = 22;
const HEIGHTS = { gpu: 24, uplink: 14, downlink: 14 };
const GAP = 4;
const FONT = "12px system-ui, sans-serif";

export class TimelineCanvas {
  constructor(canvas, say) {
    this.canvas = canvas;
    this.frame = canvas.closest(".timeline");
    this.say = say;
    this.context = canvas.getContext("2d");
    this.tops = [];
    this.rows = [];
    this.chosen = null; // {row, booking}
    this.scale = { left: 0, perUs: 1, nowX: 0, elapsedUs: 0 };
    this.length = AXIS; // of all rows
    this.width = 0;
    this.height = 0; // of what is seen of them
    new ResizeObserver(() => this.resize()).observe(this.frame);
    this.frame.addEventListener("scroll", () => this.again(), { passive: true });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  layOut(rows) {
    this.rows = rows;
    this.tops = [];
    let top = AXIS;
    for (const row of rows) {
      this.tops.push(top);
      top += HEIGHTS[row.kind] + GAP;
    }
    if (this.length !== top) {
      this.length = top;
      this.canvas.parentElement.style.height = `${top}px`;
      this.resize();
    }
    if (this.chosen) {
      const { row, booking } = this.chosen;
      this.chosen = this.find((each, other) => each.kind === row.kind && each.owner === row.owner && booking.booked && other.batch === booking.batch);
    }
  }

  /** The canvas is as large as what is seen of the rows, and stays there while they scroll. */
  resize() {
    const { clientWidth, clientHeight } = this.frame;
    const height = Math.min(this.length, clientHeight);
    const ratio = Math.min(2, devicePixelRatio || 1);
    const [wide, high] = [Math.round(clientWidth * ratio), Math.round(height * ratio)];
    if (this.canvas.width === wide && this.canvas.height === high) return;
    this.canvas.width = wide;
    this.canvas.height = high;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.width = clientWidth;
    this.height = height;
    this.again(); // a canvas of another size is empty
  }

  again() {
    if (this.drawn) this.draw(...this.drawn);
  }

  draw(rows, elapsedUs, seconds) {
    this.drawn = [rows, elapsedUs, seconds];
    const { context, width } = this;
    const colours = canvasColours();
    const labels = Math.min(150, Math.max(84, width * 0.16));
    const perUs = (width - labels) / ((seconds + AHEAD_S) * 1e6);
    this.scale = { left: labels, perUs, nowX: labels + seconds * 1e6 * perUs, elapsedUs };
    context.clearRect(0, 0, width, this.height);
    context.font = FONT;
    context.textBaseline = "middle";
    const marks = ticks(seconds, this.scale);
    context.fillStyle = colours.line;
    for (const { x } of marks) context.fillRect(x, AXIS - 4, 1, this.height - AXIS + 4);
    this.bars = Array.from(colours.models, () => ({ booked: [], real: [] }));
    this.marks = [];
    this.words = [];
    rows.forEach((row, at) => {
      if (this.inView(at)) this.row(row, this.tops[at] - this.frame.scrollTop, colours);
    });
    this.paint(colours);
    // The axis and what is now stand above all.
    context.clearRect(0, 0, width, AXIS - 4);
    context.fillStyle = colours.soft;
    writeTicks(context, marks, labels + 16, width - 14);
    context.fillStyle = colours.now;
    context.fillRect(this.scale.nowX - 0.75, AXIS - 6, 1.5, this.height - AXIS + 6);
  }

  /** Rows that are scrolled away are not drawn. */
  inView(at) {
    const top = this.tops[at] - this.frame.scrollTop;
    return top + HEIGHTS.gpu >= 0 && top <= this.height;
  }

  /** Draws bars colour by colour; single rectangles are what canvases without a GPU do best. */
  paint(colours) {
    const { context } = this;
    context.lineWidth = 1;
    this.bars.forEach(({ booked, real }, at) => {
      context.fillStyle = context.strokeStyle = colours.models[at];
      for (const [x, y, wide, high] of real) context.fillRect(x, y, wide, high);
      for (const [x, y, wide, high] of booked) {
        if (wide > 3) {
          context.strokeRect(x + 0.5, y + 0.5, wide - 1, high - 1);
        } else {
          context.fillRect(x, y, wide, 1);
          context.fillRect(x, y + high - 1, wide, 1);
        }
      }
    });
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    for (const [x, y, wide, high] of this.marks) context.strokeRect(x, y, wide, high);
    for (const { words, x, y, colour } of this.words) {
      context.fillStyle = colour;
      context.fillText(words, x, y);
    }
  }

  row(row, top, colours) {
    const { context, scale } = this;
    const height = HEIGHTS[row.kind];
    context.fillStyle = colours.stripe;
    context.fillRect(scale.left, top, this.width - scale.left, height);
    context.fillStyle = row.kind === "gpu" ? colours.ink : colours.soft;
    const arrow = { gpu: "", uplink: " ↑", downlink: " ↓" }[row.kind];
    context.fillText(fit(context, row.owner, scale.left - 22) + arrow, 2, top + height / 2);
    for (const booking of row.bookings) this.booking(booking, top, height, colours);
  }

  booking(booking, top, height, colours) {
    const bars = this.bars[booking.colour];
    const inset = height > 20 ? 5 : 3;
    if (booking.real) this.bar(bars.real, this.span(booking.realStart, booking.realEnd), top + inset, height - 2 * inset);
    const [x, wide] = booking.booked ? this.span(booking.bookedStart, booking.bookedEnd) : this.span(booking.realStart, booking.realEnd);
    if (booking.booked) this.bar(bars.booked, [x, wide], top + 1, height - 2);
    if (this.isChosen(booking)) this.bar(this.marks, [x - 1, wide + 2], top + 1, height - 2);
    if (booking.rows && height > 20 && wide > 34 && x > this.scale.left) {
      const colour = booking.real ? colours.panel : colours.ink;
      this.words.push({ words: fit(this.context, `${booking.rows}`, wide - 8), x: x + 5, y: top + height / 2 + 0.5, colour });
    }
  }

  /** A batch is one on all devices and links; a stretch without a batch stands for itself. */
  isChosen(booking) {
    if (!this.chosen) return false;
    const { booking: chosen } = this.chosen;
    return booking === chosen || (booking.booked && chosen.booked && booking.batch === chosen.batch);
  }

  /** Keeps what is right of the names, on whole pixels. */
  bar(bars, [x, wide], top, height) {
    const left = Math.round(Math.max(x, this.scale.left));
    const right = Math.round(Math.min(x + wide, this.width));
    if (x + wide > this.scale.left && x < this.width) bars.push([left, top, Math.max(1, right - left), height]);
  }

  span(startUs, endUs) {
    const { nowX, perUs, elapsedUs } = this.scale;
    const x = nowX + (startUs - elapsedUs) * perUs;
    return [x, Math.max(1.5, (endUs - startUs) * perUs)];
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top + this.frame.scrollTop];
    const at = this.tops.findIndex((top, index) => y >= top && y < top + HEIGHTS[this.rows[index].kind] + GAP);
    if (at < 0) return;
    const near = (start, end) => {
      const [left, wide] = this.span(start, end);
      return x >= left - 3 && x <= left + wide + 3;
    };
    const row = this.rows[at];
    const booking = row.bookings.find(
      (each) => (each.booked && near(each.bookedStart, each.bookedEnd)) || (each.real && near(each.realStart, each.realEnd)),
    );
    if (booking) this.choose({ row, booking });
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const busy = this.rows.filter((row) => row.bookings.length > 0);
    if (busy.length === 0) {
      this.say("Nothing is booked.");
      return;
    }
    if (!this.chosen) {
      this.choose({ row: busy[0], booking: latest(busy[0]) });
      return;
    }
    const { row, booking } = this.chosen;
    const at = Math.max(0, busy.indexOf(row));
    if (step[0]) {
      const next = busy[Math.min(busy.length - 1, Math.max(0, at + step[0]))];
      const closest = next.bookings.reduce((best, each) =>
        Math.abs(each.start - booking.start) < Math.abs(best.start - booking.start) ? each : best);
      this.choose({ row: next, booking: closest });
      return;
    }
    const ordered = [...row.bookings].sort((a, b) => a.start - b.start);
    const place = Math.max(0, ordered.indexOf(booking));
    this.choose({ row, booking: ordered[Math.min(ordered.length - 1, Math.max(0, place + step[1]))] });
  }

  choose(chosen) {
    this.chosen = chosen;
    const words = bookingWords(chosen.row, chosen.booking);
    const starts = chosen.booking.start - this.scale.elapsedUs;
    const when = starts > 0 ? `in ${duration(starts * 1000)}` : `${duration(-starts * 1000)} ago`;
    this.say(`${words} Start: ${when}.`);
  }

  find(test) {
    for (const row of this.rows) {
      const booking = row.bookings.find((each) => test(row, each));
      if (booking) return { row, booking };
    }
    return null;
  }
}

const latest = (row) => row.bookings.reduce((best, each) => (each.start > best.start ? each : best));
