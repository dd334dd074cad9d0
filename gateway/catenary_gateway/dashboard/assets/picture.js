// A picture for a vision model: cropped and scaled here, sent as a tensor, its likeliest classes.

import { ask, send } from "./api.js";
import { sentence } from "./chat.js";
import { byId, h, meter } from "./dom.js";
import { digits, duration, percent } from "./format.js";

const USUAL_SIDE = 224;
const MOST_SIDE = 2048;
const MOST_FILE_BYTES = 40e6;
const TOP = 5;
/** What becomes of a pixel value of 0 to 255, by channel; models do not say what they want. */
const SCALES = {
  centred: (value) => (value - 127) / 128,
  imagenet: (value, at) => (value / 255 - [0.485, 0.456, 0.406][at]) / [0.229, 0.224, 0.225][at],
  unit: (value) => value / 255,
  plain: (value) => value,
};

/** The one input of an offer that takes pictures: {name, datatype, width, height, planes}; else null. */
export function pictureInput(offer) {
  if (offer.generates || offer.inputs.length !== 1) return null;
  const [{ name, datatype, shape }] = offer.inputs;
  if (shape.length !== 4 || ![-1, 1].includes(shape[0]) || !["FP32", "UINT8"].includes(datatype)) return null;
  const planes = shape[1] === 3;
  if (!planes && shape[3] !== 3) return null;
  const [height, width] = (planes ? shape.slice(2) : shape.slice(1, 3)).map((side) => (side > 0 ? side : USUAL_SIDE));
  return Math.max(height, width) <= MOST_SIDE ? { name, datatype, width, height, planes } : null;
}

export class Picture {
  /** As for `Chat`. */
  constructor({ keyOf, onRefused, onDetails }) {
    this.keyOf = keyOf;
    this.onRefused = onRefused;
    this.onDetails = onDetails;
    this.offer = null;
    this.names = [];
    this.asked = 0;
    this.bitmap = null;
    this.canvas = byId("picture-canvas");
    byId("picture-file").addEventListener("change", (event) => this.take(event.target.files[0]));
    byId("picture-scale").addEventListener("change", () => this.bitmap && this.look());
    const drop = byId("picture");
    drop.addEventListener("dragover", (event) => event.preventDefault());
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      this.take(event.dataTransfer.files[0]);
    });
    document.addEventListener("paste", (event) => {
      if (!drop.hidden && event.clipboardData.files.length) this.take(event.clipboardData.files[0]);
    });
  }

  /** Asks another model; the picture stays. */
  async begin(offer) {
    this.offer = offer;
    this.input = pictureInput(offer);
    this.names = [];
    this.say("");
    byId("picture-classes").replaceChildren();
    const { width, height } = this.input;
    Object.assign(this.canvas, { width, height });
    byId("picture-needs").textContent = `The model sees ${width} × ${height} pixels, cut from the middle.`;
    if (this.bitmap) this.look();
  }

  async take(file) {
    if (!file) return;
    if (file.size > MOST_FILE_BYTES) {
      this.say("The file is larger than 40 MB.", true);
      return;
    }
    try {
      this.bitmap = await createImageBitmap(file);
    } catch {
      this.say("This is no picture that the browser can read.", true);
      return;
    }
    this.canvas.setAttribute("aria-label", `Your picture ${file.name}, as the model sees it`);
    byId("picture-empty").hidden = true;
    this.canvas.hidden = false;
    this.look();
  }

  async look() {
    const number = ++this.asked;
    const { offer, input } = this;
    const tensor = this.tensor(input);
    const head = new TextEncoder().encode(
      JSON.stringify({
        inputs: [
          {
            name: input.name,
            datatype: input.datatype,
            shape: input.planes ? [1, 3, input.height, input.width] : [1, input.height, input.width, 3],
            parameters: { binary_data_size: tensor.byteLength },
          },
        ],
      }),
    );
    this.say("The model looks at it …");
    try {
      const names = this.namesOf(offer);
      const begun = performance.now();
      const response = await send(
        `v2/models/${encodeURIComponent(offer.name)}/versions/${encodeURIComponent(offer.version)}/infer`,
        {
          key: this.keyOf(),
          headers: { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.byteLength) },
          body: new Blob([head, tensor]),
        },
      );
      const { id, outputs } = await response.json();
      const tookMs = performance.now() - begun;
      const known = await names;
      if (number !== this.asked) return;
      byId("picture-classes").replaceChildren(...shown(outputs, known));
      this.say(`Answered in ${duration(tookMs * 1e6)}. `);
      byId("picture-figures").append(
        h("button", { type: "button", class: "link", onclick: () => this.onDetails(id) }, "Where the time went"),
      );
    } catch (problem) {
      if (number !== this.asked) return;
      this.say(sentence(problem.message), true);
      this.onRefused(problem);
    }
  }

  /** The names of a model's classes; none if it has none, or they cannot be had now. */
  async namesOf(offer) {
    if (this.names.length === 0) {
      try {
        this.names = (await ask("classes", { model: offer.name, version: offer.version })).value.names;
      } catch {
        return [];
      }
    }
    return this.names;
  }

  /** Draws the largest part of the middle that has the shape wanted, and returns its values. */
  tensor({ datatype, width, height, planes }) {
    const context = this.canvas.getContext("2d", { willReadFrequently: true });
    const keep = Math.min(this.bitmap.width / width, this.bitmap.height / height);
    const [w, hi] = [keep * width, keep * height];
    context.imageSmoothingQuality = "high";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.drawImage(this.bitmap, (this.bitmap.width - w) / 2, (this.bitmap.height - hi) / 2, w, hi, 0, 0, width, height);
    const pixels = context.getImageData(0, 0, width, height).data;
    const values = new (datatype === "UINT8" ? Uint8Array : Float32Array)(3 * width * height);
    const scale = datatype === "UINT8" ? SCALES.plain : SCALES[byId("picture-scale").value];
    const size = width * height;
    for (let at = 0; at < size; at += 1) {
      for (let channel = 0; channel < 3; channel += 1) {
        values[planes ? channel * size + at : at * 3 + channel] = scale(pixels[at * 4 + channel], channel);
      }
    }
    return values;
  }

  say(words, isProblem = false) {
    const figures = byId("picture-figures");
    figures.textContent = words;
    figures.className = isProblem ? "problem" : "note";
  }
}

/** The likeliest classes of the first output that has scores; else what the outputs are. */
function shown(outputs, names) {
  const scores = outputs.find((output) => /^FP|^BF/.test(output.datatype) && output.shape.length === 2 && output.shape[1] > 1);
  if (!scores) {
    return outputs.map(({ name, datatype, shape, data }) => {
      const first = (data || []).flat(Infinity).slice(0, 6);
      return h("li", null, `${name}: ${datatype} [${shape.join(", ")}] ${first.map((value) => (typeof value === "number" ? digits(value) : value)).join(", ")} …`);
    });
  }
  return likeliest(scores.data.flat(Infinity)).map(([at, share]) => {
    const bar = meter("");
    bar.show(share, percent(share));
    return h("li", null, h("span", { class: "class-name" }, names[at] || `class ${at}`), bar);
  });
}

/** Pairs of a class and its probability; scores that are none yet go through a softmax. */
function likeliest(scores) {
  const isShare = Math.min(...scores) >= 0 && Math.abs(scores.reduce((sum, each) => sum + each, 0) - 1) < 1e-3;
  const highest = Math.max(...scores);
  const odds = isShare ? scores : scores.map((score) => Math.exp(score - highest));
  const all = odds.reduce((sum, each) => sum + each, 0);
  return odds
    .map((each, at) => [at, each / all])
    .sort((a, b) => b[1] - a[1])
    .slice(0, TOP);
}
