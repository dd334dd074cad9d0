// Small tools to make and update elements. Text is always set as text, never as markup.

const LONG = 44;
const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Makes an HTML element: h("p", {class: "note"}, "text", child). */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Makes an SVG element. */
export function s(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Sets the text of an element if it changes: what stays the same costs no layout. */
export function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
  return element;
}

export function attribute(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Makes the children of `parent` those of `items`, reusing what is there, so that focus stays. */
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.keyedChildren || (parent.keyedChildren = new Map());
  const wanted = new Map(items.map((item) => [String(keyOf(item)), item]));
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
  let at = parent.firstElementChild;
  for (const [key, item] of wanted) {
    let element = known.get(key);
    if (!element) {
      element = make(item);
      known.set(key, element);
    }
    update(element, item);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
}

/** Shows [term, value] pairs in a <dl>. */
export function facts(list, pairs) {
  keyed(
    list,
    pairs,
    ([term]) => term,
    ([term]) => h("div", null, h("dt", null, term), h("dd", null)),
    (row, [, value, tone]) => {
      text(row.lastElementChild, value);
      attribute(row, "data-tone", tone || null);
      attribute(row, "data-wide", String(value).length > LONG || null);
    },
  );
}

/** A bar of a share of 0..1, between its label, if it has one, and its text. */
export function meter(label) {
  const fillBar = h("span", { class: "fill" });
  const bar = h("span", { class: "meter", "aria-hidden": "true" }, fillBar);
  const words = h("span", { class: "meter-text" });
  const element = h("span", { class: "metered" }, label ? h("span", { class: "meter-label" }, label) : null, bar, words);
  element.show = (share, said, tone) => {
    const percent = `${Math.round(Math.min(1, Math.max(0, share)) * 1000) / 10}%`;
    if (fillBar.style.width !== percent) fillBar.style.width = percent;
    text(words, said);
    attribute(element, "data-tone", tone || null);
  };
  return element;
}
