// Tables that become lists of cards on a narrow screen.

import { h, keyed, text } from "./dom.js";
import { colourOf } from "./palette.js";

/**
 * A table. Each column is {name, wide?, number?, inside?, cell(item) -> text, make?() -> element
 * with show(item)}. Roles are said again, because cards are laid out without table display.
 */
export function table(holder, { label, columns, keyOf, empty, rowClass }) {
  const body = h("tbody", { role: "rowgroup" });
  const heads = columns.map((column) =>
    h("th", { scope: "col", role: "columnheader", class: classesOf(column) }, column.name),
  );
  const made = h(
    "table",
    { role: "table", "aria-label": label },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...heads)),
    body,
  );
  // Nothing is claimed before the first answer.
  made.hidden = true;
  const nothing = h("p", { class: "empty" }, "No answer yet.");
  holder.replaceChildren(made, nothing);

  const makeRow = () =>
    h(
      "tr",
      { role: "row" },
      ...columns.map((column) => {
        const cell = h("td", {
          role: "cell",
          "data-label": column.name,
          class: classesOf(column),
        });
        if (column.make) {
          cell.inner = column.make();
          cell.append(cell.inner);
        }
        return cell;
      }),
    );
  const updateRow = (row, item) => {
    if (rowClass) row.className = rowClass(item);
    columns.forEach((column, index) => {
      const cell = row.children[index];
      if (cell.inner) cell.inner.show(item);
      else text(cell, column.cell(item));
    });
  };
  return (items) => {
    made.hidden = items.length === 0;
    nothing.hidden = items.length > 0;
    text(nothing, empty);
    keyed(body, items, keyOf, makeRow, updateRow);
  };
}

const classesOf = (column) => ["number", "wide", "inside"].filter((name) => column[name]).join(" ") || null;

/** A cell's button with the id of an item, which opens what is known of it. */
export function opener(onOpen, idOf, labelFor) {
  const button = h("button", { type: "button", class: "link" });
  button.show = (item) => {
    const id = idOf(item);
    text(button, id);
    button.onclick = () => onOpen(id);
    button.setAttribute("aria-label", labelFor(id));
  };
  return button;
}

/** A cell with a text beside the colour of the model whose label `labelOf` tells. */
export function named(labelOf, wordsOf = labelOf, tag = "strong") {
  const words = h(tag, null);
  const element = h("span", null, h("span", { class: "swatch", "aria-hidden": "true" }), words);
  element.show = (item) => {
    element.className = `named ${colourOf(labelOf(item))}`;
    text(words, wordsOf(item));
  };
  return element;
}
