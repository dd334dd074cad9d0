// Which of eight colours a model has. Colours are told apart by the colour-blind (after Okabe and
// Ito), and never say anything alone: a name stands beside each.

const COLOURS = 8;
const known = new Map();

/** The class that gives an element and what is in it the model's colour; the same all along. */
export function colourOf(label) {
  if (!known.has(label)) known.set(label, known.size % COLOURS);
  return `m${known.get(label)}`;
}

/** Gives models their colours in the order of their names: on every page the same. */
export function nameColours(labels) {
  [...labels].sort().forEach(colourOf);
}

let cached = null;

/** Colours as the style sheet has them now, for canvases. */
export function canvasColours() {
  if (cached === null) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    cached = {
      models: Array.from({ length: COLOURS }, (_, at) => read(`--m${at}`)),
      ink: read("--ink"),
      soft: read("--soft"),
      line: read("--line"),
      panel: read("--panel"),
      stripe: read("--stripe"),
      now: read("--bad"),
    };
  }
  return cached;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  cached = null;
});
